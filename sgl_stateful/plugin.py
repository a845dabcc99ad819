"""What the entry points of the distribution name. SGLang calls them in every process that it starts."""


def portable_cpu() -> str | None:
    """Dotted path of the CPU platform where it should serve, for the group `sglang.srt.platforms`."""
    from sgl_stateful.sglang_adapter.platform import activate

    return activate()


def register() -> None:
    """Attach to SGLang, for the group `sglang.srt.plugins`."""
    from sgl_stateful.sglang_adapter import attention, hooks

    attention.register()
    hooks.register_hooks()
