"""`python -m hf_cb.kernels` compiles the kernels before their first use, and prints the library's file."""

import sys

from hf_cb.kernels.extension import BuildError, load

if __name__ == "__main__":
    try:
        print(load())
    except BuildError as error:
        sys.exit(str(error))
