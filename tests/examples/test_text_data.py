"""The text that `train_moe` reads, and the windows that it cuts from it."""

from pathlib import Path

import numpy as np

from jax_grouped.examples import text_data


def test_windows_depend_on_seed_and_step_alone() -> None:
    data = np.arange(10_000, dtype=np.uint16)

    windows = text_data.random_windows(data, sequence=64, batch=8, seed=1, step=2)

    assert windows.shape == (8, 65)
    assert np.array_equal(windows - windows[:, :1], np.tile(np.arange(65), (8, 1)))
    assert np.array_equal(windows, text_data.random_windows(data, 64, 8, 1, 2))
    assert not np.array_equal(windows, text_data.random_windows(data, 64, 8, 1, 3))
    assert not np.array_equal(windows, text_data.random_windows(data, 64, 8, 2, 2))


def test_windows_reach_the_ends_of_the_text() -> None:
    data = np.arange(34)

    random = text_data.random_windows(data, sequence=32, batch=64, seed=0, step=0)

    assert sorted(set(random[:, 0])) == [0, 1]
    assert text_data.even_windows(data, sequence=32, count=3)[:, 0].tolist() == [0, 0, 1]


def test_a_folder_is_read_in_one_order_without_hidden_and_binary_files(tmp_path: Path) -> None:
    for name, content in {
        "a.txt": b"a" * 100,
        "b/c.md": b"c" * 100,
        "binary": b"\0" * 100,
        ".hidden": b"h" * 100,
        ".git/config": b"g" * 100,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "dangling").symlink_to("nowhere")

    corpus = text_data.read_corpus(str(tmp_path), sequence=8)

    assert bytes(corpus.train) + bytes(corpus.held_out) in (b"a" * 100 + b"c" * 100, b"c" * 100 + b"a" * 100)
    assert len(corpus.held_out) == 10
    assert corpus.sha256 == text_data.read_corpus(str(tmp_path), sequence=8).sha256


def test_the_default_text_is_the_standard_library() -> None:
    corpus = text_data.read_corpus(None, sequence=128)

    text = bytes(corpus.train) + bytes(corpus.held_out)
    assert len(text) > 1_000_000
    assert b"class ArgumentParser" in text
