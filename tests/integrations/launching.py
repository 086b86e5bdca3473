"""`accelerate launch` as people type it, on processes of this machine's CPU."""

from __future__ import annotations

import sys

from processes import Program

_LAUNCH = (sys.executable, "-m", "accelerate.commands.launch")


class Launch(Program):
    """The program on so many processes."""

    def __init__(self, num_processes: int, *arguments: object) -> None:
        several = ("--multi_gpu", "--num_processes", num_processes, "--main_process_port", 0)
        ways = several if num_processes > 1 else ("--cpu",)
        super().__init__(*_LAUNCH, *ways, "-m", "integrations.accelerate_generate", *arguments)

    def ranks(self) -> dict[int, int]:
        """Rank -> process id, of the living."""
        return {int(environment["RANK"]): pid for pid, environment in self.environments().items() if "RANK" in environment}


def launch(num_processes: int, *arguments: object) -> tuple[int, str]:
    """The exit status of a launch that is left to itself, and what it printed."""
    with Launch(num_processes, *arguments) as running:
        return running.wait()
