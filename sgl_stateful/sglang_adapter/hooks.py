"""Where sgl-stateful hangs in SGLang: one place that lists every hook.

SGLang logs a hook that fails to apply and goes on; ``selfcheck`` looks for each instead, in every process.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.registry import register_radix_cache_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from memstore import KVBlobs, MemStore
from sgl_stateful.directive import DIRECTIVE_KEY
from sgl_stateful.errors import IncompatibleServer, SessionError
from sgl_stateful.prompt import SENTINEL, split_at_sentinel
from sgl_stateful.service import MemoryService
from sgl_stateful.settings import StatefulSettings

from . import chat, holes, requests, session_start
from .attach import create_stateful_cache
from .control import StatefulControlReqInput, StatefulScheduler, register_control_types
from .engine import SGLangEngine
from .selfcheck import check_hooks
from .session_start import SessionStarter

logger = logging.getLogger(__name__)

BACKEND = "stateful"
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_WORKER = "sglang.srt.managers.tp_worker.TpModelWorker"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_HTTP_SERVER = "sglang.srt.entrypoints.http_server"
_ABORTED_S = 2.0  # in which a request that was aborted has left the scheduler
_WEIGHT_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)


def register_hooks() -> None:
    """Register the cache backend, the control call and every hook."""
    register_radix_cache_backend(BACKEND, create_stateful_cache)
    register_control_types()
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler", StatefulScheduler, HookType.REPLACE)
    HookRegistry.register(f"{_WORKER}.forward_batch_generation", holes.around_forward, HookType.AROUND)
    HookRegistry.register(f"{_RUNNER}.forward", holes.around_model_forward, HookType.AROUND)
    HookRegistry.register(f"{_ADDER}._replay_len", holes.around_replay_len, HookType.AROUND)
    HookRegistry.register(f"{_STREAMER}.is_request_level_customized_info_key", around_is_request_level, HookType.AROUND)
    HookRegistry.register(f"{_MANAGER}.__init__", after_manager_init, HookType.AFTER)
    HookRegistry.register(f"{_MANAGER}.generate_request", requests.around_generate_request, HookType.AROUND)
    HookRegistry.register(f"{_MANAGER}.flush_cache", around_flush_cache, HookType.AROUND)
    for name in _WEIGHT_UPDATES:
        HookRegistry.register(f"{_MANAGER}.{name}", around_weight_update, HookType.AROUND)
    HookRegistry.register(f"{_CHAT}.handle_request", chat.around_handle, HookType.AROUND)
    HookRegistry.register(f"{_CHAT}._convert_to_internal_request", chat.around_convert, HookType.AROUND)
    HookRegistry.register(f"{_CHAT}._handle_non_streaming_request", chat.around_non_streaming, HookType.AROUND)
    HookRegistry.register(f"{_CHAT}._generate_chat_stream", chat.around_stream, HookType.AROUND)
    HookRegistry.register(f"{_HTTP_SERVER}._create_error_response", around_error_response, HookType.AROUND)
    HookRegistry.register(f"{_HTTP_SERVER}._setup_and_run_http_server", before_http_server, HookType.BEFORE)


def around_is_request_level(original: Callable[..., bool], streamer: Any, key: str) -> bool:
    """AROUND ``is_request_level_customized_info_key``: our report belongs to the request, not to one of its tokens."""
    return key == DIRECTIVE_KEY or original(streamer, key)


def around_error_response(original: Callable[..., Any], error: Any) -> Any:
    """AROUND ``_create_error_response``, by which ``/generate`` answers: a session's refusal with all that it says."""
    if not isinstance(error, SessionError):
        return original(error)
    from .session_errors import session_error

    return session_error(error)


def after_manager_init(_: None, manager: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``TokenizerManager.__init__``: open the memory where this server has one."""
    if server_args.radix_cache_backend != BACKEND:
        return
    check_hooks(StatefulScheduler, StatefulControlReqInput)
    settings = StatefulSettings()
    engine = SGLangEngine(manager)
    setattr(manager, requests.ENGINE, engine)
    service: MemoryService | None = None
    if settings.memory is not None:
        before, behind = _around_first_message(manager.tokenizer)
        blobs = KVBlobs(settings.kv_path(), settings=settings.store_settings())
        service = MemoryService(
            settings=settings,
            store=MemStore(settings.memory, settings=settings.store_settings(), blobs=blobs),
            blobs=blobs,
            tokenizer=manager.tokenizer,
            engine=engine,
            context=before,
            context_end=behind,
            context_len=manager.context_len,
        )
        setattr(manager, requests.SERVICE, service)
    if manager.tokenizer is not None:
        setattr(manager, session_start.STARTER, session_start.SessionStarter(manager, settings, engine, service))


def _around_first_message(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before and behind a first user message.

    For a model without a template the BOS token and a newline.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return tokenizer.bos_token or "", "\n"
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": SENTINEL}], tokenize=False, add_generation_prompt=True
    )
    return split_at_sentinel(rendered)


async def around_weight_update(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND each way to update weights: encodings made before are not spliced after."""
    service, sessions = requests.service_of(manager), session_start.starter_of(manager)
    if service is not None:
        await service.weights_changing()
    if sessions is not None:
        await sessions.weights_changing()
    try:
        return await original(manager, *args, **kwargs)
    finally:
        if sessions is not None:
            await sessions.weights_changed()
        if service is not None:
            await service.weights_changed()


async def around_flush_cache(original: Callable[..., Any], manager: Any, timeout_s: float | None = None) -> Any:
    """AROUND ``flush_cache``: answers that were stored are forgotten too, and none is worked out meanwhile."""
    starter = session_start.starter_of(manager)
    if starter is None or starter.flash is None:
        return await original(manager, timeout_s)
    async with starter.flash.flushing() as broken_off:
        # SGLang refuses while a request runs, and one of ours may need a moment to end.
        return await original(manager, max(timeout_s or 0.0, _ABORTED_S) if broken_off else timeout_s)


def before_http_server(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """BEFORE ``_setup_and_run_http_server``: add the routes, and verify splicing before the server reports ready."""
    from sglang.srt.entrypoints import http_server

    manager = kwargs.get("tokenizer_manager", args[1] if len(args) > 1 else None)
    service, sessions = requests.service_of(manager), session_start.starter_of(manager)
    if sessions is None and service is None:
        return args, kwargs
    from .entry_routes import add_entry_routes
    from .flash_routes import add_flash_routes
    from .routes import add_routes
    from .session_routes import add_session_routes

    if service is not None:
        add_routes(http_server.app, service)
    if sessions is not None:
        add_session_routes(http_server.app, manager, sessions.ready, default_ttl_s=sessions.settings.session_ttl_s)
        add_flash_routes(http_server.app, sessions.ready_flash, reader_s=sessions.settings.flash_reader_s)
        add_entry_routes(http_server.app, sessions.ready_flash)
    warm_up = kwargs.get("execute_warmup_func") or http_server._execute_server_warmup

    def warm_up_and_verify(server_args: Any) -> bool:
        if not warm_up(server_args):
            return False
        _start_or_die(manager, service, sessions)
        return True

    kwargs["execute_warmup_func"] = warm_up_and_verify
    return args, kwargs


def _start_or_die(manager: Any, service: MemoryService | None, sessions: SessionStarter | None) -> None:
    """Start the memory from SGLang's warm-up thread; a server that cannot splice faithfully must not serve."""
    from sglang.srt.utils import kill_process_tree

    async def start() -> None:
        if service is not None:
            await service.start()
        if sessions is not None:
            await sessions.ready()

    try:
        asyncio.run_coroutine_threadsafe(start(), manager.event_loop).result()
    except Exception as error:
        logger.critical("sgl-stateful stops this server: %s", error, exc_info=not isinstance(error, IncompatibleServer))
        if service is not None:
            service.close()
        kill_process_tree(os.getpid())
