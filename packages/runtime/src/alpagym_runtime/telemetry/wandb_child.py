"""The process that speaks to W&B: settings and rows come as lines of JSON on stdin, the end of stdin ends it.

Started by `wandb_logger`, never by people. Exit code 0: everything was handed over.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from typing import Any


def main() -> int:
    """Serve until stdin ends."""
    # What libraries print must not look like an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    try:
        run = _init(settings)
    except Exception as err:
        answers.write(json.dumps({"error": " ".join(str(err).split())[:500] or type(err).__name__}) + "\n")
        answers.flush()
        return 1
    with contextlib.suppress(OSError):  # nobody waits for it offline
        answers.write(json.dumps({"ready": True}) + "\n")
        answers.flush()
    run.define_metric("total_steps")
    run.define_metric("*", step_metric="total_steps")
    for line in sys.stdin:
        run.log(json.loads(line)["row"])
    run.finish()
    return 0


def _init(settings: dict[str, Any]) -> Any:
    import wandb

    # Retries are bounded: the files stay, and `wandb sync` sends what was not taken.
    patience: dict[str, Any] = {
        f"x_{part}_{what}": value
        for part in ("graphql", "file_stream", "file_transfer")
        for what, value in (("retry_max", 2), ("retry_wait_max_seconds", 2), ("timeout_seconds", settings["timeout_s"]))
    }
    extra: dict[str, Any] = {"base_url": settings["base_url"]} if settings["base_url"] else {}
    return wandb.init(
        mode=settings["mode"],
        dir=settings["directory"],
        # The same run directory is the same run, also after a stop.
        id=hashlib.sha256(settings["directory"].encode()).hexdigest()[:12],
        resume="allow",
        name=settings["name"],
        project=settings["project"],
        entity=settings["entity"],
        tags=settings["tags"],
        config=settings["config"],
        settings=wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            # Neither the machine's load nor its environment: a run's files say what it was.
            x_disable_stats=True,
            x_disable_meta=True,
            init_timeout=settings["timeout_s"],
            **patience,
            **extra,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
