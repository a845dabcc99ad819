"""SGLang's server, started from our command line."""

from __future__ import annotations

import os
from collections.abc import Sequence


def launch_server(arguments: Sequence[str]) -> None:
    """Parse SGLang's flags and run its server in this process until it ends.

    Raises
    ------
    IncompatibleServer
        An SGLang version or a flag that cannot be served; before anything is started.
    """
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from .selfcheck import check_flags, check_sglang_version

    load_plugins()
    check_sglang_version()
    server_args = prepare_server_args(list(arguments))
    check_flags(server_args)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
