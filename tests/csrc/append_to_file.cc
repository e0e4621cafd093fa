// append_to_file PATH TEXT: prints how many bytes the file holds, then appends the text to it.

#include <cstdio>

#include "csrc/gemm/cublaslt/text_file.h"

int main(int, char** arguments) {
  std::printf("%zu\n", jax_grouped::TextFile::OpenToRead(arguments[1]).Read().size());
  const auto file = jax_grouped::TextFile::OpenToAppend(arguments[1]);
  if (file.Lock()) file.Append(arguments[2]);
}
