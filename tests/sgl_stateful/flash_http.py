"""The routes of sessions and of their questions, as an application."""

from __future__ import annotations

from fastapi import FastAPI
from flash_setup import Setup

from sgl_stateful.flash.service import FlashService
from sgl_stateful.sessions.service import SessionService
from sgl_stateful.sglang_adapter.entry_routes import add_entry_routes
from sgl_stateful.sglang_adapter.flash_routes import add_flash_routes
from sgl_stateful.sglang_adapter.session_routes import add_session_routes


def application(setup: Setup, *, reader_s: float = 30.0) -> FastAPI:
    """Without queries and turns, which need SGLang's tokenizer manager."""
    app = FastAPI()

    async def sessions() -> SessionService:
        return setup.sessions

    async def flash() -> FlashService:
        return setup.flash

    add_session_routes(app, None, sessions, default_ttl_s=60.0)
    add_flash_routes(app, flash, reader_s=reader_s)
    add_entry_routes(app, flash)
    return app
