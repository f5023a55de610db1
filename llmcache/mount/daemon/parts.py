"""Puts the parts of a mount together: state, engine, pin store and back end of a mode."""

from __future__ import annotations

from llmcache.cache.arbitration import (
    EXPERTS_ALLOWANCE_BYTES,
    INPLACE_ALLOWANCE_BYTES,
    LEAST_WINDOW_MIN_BYTES,
    MIN_WINDOW_BYTES,
    WINDOW_ALLOWANCE_BYTES,
)
from llmcache.cache.steering import Spaces, Steering
from llmcache.mount.backends.fuse import FuseBackend
from llmcache.mount.backends.inplace import InPlaceBackend
from llmcache.mount.backends.pins import ArenaPinStore, LockedPinStore, PinService
from llmcache.mount.client.mountpoint import find
from llmcache.mount.engine.engine import Engine
from llmcache.mount.source.tree import SourceTree
from llmcache.mount.state.buffers import BufferPool
from llmcache.mount.state.interfaces import Backend, PinHelpers, PinStore
from llmcache.mount.state.state import CacheState

POOL_BUFFERS = 12
POOL_RESERVE = 4


def new_engine(cache_bytes: int, mode: str, tree: SourceTree, pinned: tuple[str, ...] = ()) -> Engine:
    """Return an engine of a mount of `tree`. `pinned`: globs of files to pin first."""
    is_in_place = mode == "inplace"
    state = CacheState(
        cache_bytes,
        BufferPool(POOL_BUFFERS, POOL_RESERVE),
        Steering(cache_bytes) if mode == "arena" else Spaces(cache_bytes),
        allowance_bytes=INPLACE_ALLOWANCE_BYTES if is_in_place else WINDOW_ALLOWANCE_BYTES,
        experts_allowance_bytes=EXPERTS_ALLOWANCE_BYTES if mode == "steer" else 0,
        least_window_bytes=LEAST_WINDOW_MIN_BYTES if is_in_place else MIN_WINDOW_BYTES,
    )
    return Engine(state, mode, tree, _parts, pinned)


def _parts(engine: Engine) -> tuple[PinHelpers, PinStore, Backend]:
    state = engine.state
    pins = PinService(
        engine.attached,
        engine.lock_failed,
        engine.helper_lost,
        lambda path: engine.tree.targets.get(path),  # the dict is replaced when SOURCE is walked
        engine.is_limited,
        state.services,
    )
    pins.may_look = lambda: engine.backend.in_place or not engine.judge.is_exposing
    pin_store: PinStore
    if isinstance(state.steering, Steering):
        pin_store = ArenaPinStore(state, state.steering)
        state.steering.on_plan = engine.replan
    else:
        pin_store = LockedPinStore(state, pins)
    backend: Backend = InPlaceBackend(engine) if engine.mode == "inplace" else FuseBackend(state, pin_store, find)
    return pins, pin_store, backend
