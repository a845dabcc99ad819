"""What tests of the GPU kernels share."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels are compiled here and now, not found where an earlier run left them."""
    from triton import knobs

    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield
