"""Entry point of the agent: `session`, or one command with its order on stdin.

Other arguments: `nvml`, with which the agent calls itself to read GPUs; `rank`, which a launcher
calls for each rank; `task`, one command in a container with its order as an argument; `container`,
which runs the ranks of a container.
"""

from __future__ import annotations

import os
import sys


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["nvml"]:
        from relaunch.agent.node import nvml

        return nvml.main(arguments[1:])
    if arguments[:1] == ["rank"]:
        from relaunch.agent.ranks import launched

        return launched.main(arguments[1:])
    if arguments[:1] == ["task"]:
        from relaunch.agent.container import task

        return task.main(arguments[1:])
    if arguments[:1] == ["container"]:
        from relaunch.agent.container import container

        return container.main(arguments[1:])
    from relaunch.agent import processes
    from relaunch.agent.children import COMMANDS, write
    from relaunch.agent.protocol import Refusal, line
    from relaunch.agent.session import Session
    from relaunch.agent.state import open_state

    if len(arguments) != 1 or arguments[0] not in ("session", *COMMANDS):
        sys.stderr.write(
            f"usage: python3 <agent> {'|'.join(['session', *COMMANDS])} < order.json\n"
        )
        return 2
    processes.forgo_cores()
    try:
        state = open_state()
    except Refusal as refused:
        write(1, line(refused.answer))
        return 0
    return Session(state, None if arguments[0] == "session" else arguments[0]).run()


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
