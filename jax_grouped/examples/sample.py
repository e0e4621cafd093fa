"""Text from a trained model."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped.examples.model import LanguageModel, Variables

#: Divides the logits: below 1, likely bytes become likelier.
TEMPERATURE = 0.7


def continuation(model: LanguageModel, variables: Variables, prompt: np.ndarray, count: int, seed: int) -> str:
    """Returns text that a model predicts, a byte at a time.

    Args:
        model: of one device.
        variables: of the model, on that device.
        prompt: `uint8[S]`, the bytes before; each byte is predicted from the last `S`.
        count: number of bytes.
        seed: of the choice among likely bytes.

    Returns:
        The text, as `printable` makes it.
    """

    @jax.jit
    def predict(variables: Variables, prompt: jax.Array, keys: jax.Array) -> jax.Array:
        def add(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = model.apply(variables, window[None])[0][0, -1]
            byte = jax.random.categorical(key, logits / TEMPERATURE)
            return jnp.append(window[1:], byte), byte

        return jax.lax.scan(add, prompt.astype(jnp.int32), keys)[1]

    return printable(np.asarray(predict(variables, prompt, jax.random.split(jax.random.key(seed), count))))


def printable(data: np.ndarray) -> str:
    """Returns the text of bytes, with `\N{REPLACEMENT CHARACTER}` for what cannot be printed."""
    text = data.astype(np.uint8).tobytes().decode(errors="replace")
    return "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in text)
