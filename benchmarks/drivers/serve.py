"""A server of one model, for benchmarks.serving: `python -m benchmarks.drivers.serve FOLDER NAME ENGINE_AS_JSON`.

It prints its address when it listens.
"""

from __future__ import annotations

import json
import sys

from hf_cb.server.models import load_model
from hf_cb.server.run import serve
from hf_cb.server.settings import ServerSettings


def main() -> None:
    folder, name, engine = sys.argv[1:]
    served = load_model(folder, name, **json.loads(engine))
    serve([served], ServerSettings(port=0), on_ready=lambda url: print(url, flush=True))


if __name__ == "__main__":
    main()
