"""Runs `retrograde` commands in forked processes: torch is imported once for all of them.

A line of JSON on stdin asks, a line on stdout answers. {"argv", "env", "log"} starts a process and gives its pid; {"wait": pid}
gives its exit code, negative for a signal.
"""

import json
import os
import sys

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp

import retrograde.training.picture
import retrograde.training.sharded  # noqa: F401
from retrograde.cli import app, sample, train  # noqa: F401


def child(order):
    os.environ.update(order["env"])
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{order['log']}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.setpgid(0, 0)
    code = 70
    try:
        code = app.main(order["argv"])
    except SystemExit as left:
        code = left.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            status = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
            answer = {"rc": status}
        else:
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                child(order)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
