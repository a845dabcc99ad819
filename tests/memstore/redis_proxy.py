"""A TCP proxy that loses replies, for tests."""

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self


class LossyProxy:
    """Forwards to a port of 127.0.0.1; of each connection that `lose_reply` is about, one reply never arrives."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._replies_until_loss: int | None = None
        self._then: Callable[[], None] | None = None
        self.lost = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_reply(self, *, after: int = 0, then: Callable[[], None] | None = None) -> None:
        """Call `then` and close the connection, instead of forwarding the reply that comes after `after` others."""
        with self._lock:
            self._replies_until_loss, self._then = after, then

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                threading.Thread(target=self._requests, args=(client, server), daemon=True).start()
                threading.Thread(target=self._replies, args=(server, client), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with client, server, contextlib.suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)

    def _replies(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if self._is_to_lose():
                    break
                client.sendall(data)
        for side in (client, server):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def _is_to_lose(self) -> bool:
        with self._lock:
            if self._replies_until_loss is None:
                return False
            if self._replies_until_loss:
                self._replies_until_loss -= 1
                return False
            self._replies_until_loss = None
            self.lost += 1
            if self._then is not None:
                self._then()
            return True
