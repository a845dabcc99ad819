"""What loading the plugin must not do."""

from __future__ import annotations

import subprocess
import sys


def test_loading_leaves_prometheus_to_sglang() -> None:
    code = (
        "import sys, sgl_stateful.plugin as p; p.register();"
        "from sgl_stateful.sglang_adapter import hooks, routes;"
        "print('prometheus_client' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"
