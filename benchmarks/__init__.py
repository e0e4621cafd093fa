"""Named shapes that the tests share, and programs that measure the library's speed on them."""
