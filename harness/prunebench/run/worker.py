"""A grid's worker process: arms as JSON lines in, one JSON line per finished arm out; ends when its input does.

Arguments: the records folder, and the process id of the grid, without which a worker does not go on.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from prunebench.errors import PruneBenchError
from prunebench.moe import quiet_libraries
from prunebench.run.arm import prepare
from prunebench.run.session import Session
from prunebench.run.spec import ArmSpec

__all__ = ["main"]


def main() -> None:
    """Serve until standard input is closed."""
    # Whatever a library prints must not mix with replies.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _end_with(int(sys.argv[2]))
    quiet_libraries()
    session = Session(Path(sys.argv[1]))
    for line in sys.stdin:
        try:
            outcome = session.execute(prepare(ArmSpec.from_json(json.loads(line))))
            reply = {"seconds": str(outcome.run.record["volatile"]["seconds"])}
        except PruneBenchError as error:
            reply = {"error": str(error)}
        reply["score_passes"] = str(session.score_passes)
        session.score_passes = 0
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _end_with(parent: int) -> None:
    """End this process soon after its parent is gone: a killed grid leaves nobody at work."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="watch the parent", daemon=True).start()


if __name__ == "__main__":
    main()
