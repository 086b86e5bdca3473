"""`python -m hf_cb.cli` is `hf-cb`."""

import sys

from hf_cb.cli.main import main

sys.exit(main())
