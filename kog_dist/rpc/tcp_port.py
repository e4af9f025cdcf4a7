"""The TCP port of an engine: zmq's ROUTER, which takes only connections that are encrypted (CURVE) with its client key."""

from __future__ import annotations

import zmq
from zmq.utils import z85

from kog_dist.errors import LaunchError
from kog_dist.rpc.file_port import HANDSHAKE_S, Gone
from kog_dist.rpc.transport import PEER_HWM, Access, set_heartbeats
from kog_dist.rpc.zmtp import ZmtpMessage
from kog_dist.runtime.port_holder import holder_of_port

_FRAME, _ADDRESS = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # `send_multipart` takes three times as long
TCP_NAME = b"tcp-"  # begins every name given here: a client chooses its own zmq identity, which may be a name of another port
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_CURVE_DOMAIN = b"kog"


class TcpPort:
    """Like FilePort. zmq's descriptors are edge-triggered: look at `has_input` before sleeping."""

    def __init__(self, host: str, port: int, max_bytes: int) -> None:
        """Bind at once; port 0 takes a free one. Raises LaunchError naming who holds the port."""
        if not zmq.has("curve"):
            raise LaunchError("this build of zmq has no CURVE encryption, so no TCP port can be opened; use the socket file")
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._allowed_key = z85.decode(client_public)
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._zap: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        try:
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.bind(_ZAP_ADDRESS)
            self._set_options(server_secret, max_bytes)
            self._bind(host, port)
        except BaseException:
            self.close(0.0)
            raise
        address = self._router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.access = Access(address, server_public.decode(), client_public.decode(), client_secret.decode())
        self.sockets = [self._router, self._zap]
        self.fds = [int(one.getsockopt(zmq.FD)) for one in self.sockets]

    def _set_options(self, server_secret: bytes, max_bytes: int) -> None:
        router = self._router
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.SNDHWM, PEER_HWM)
        router.setsockopt(zmq.RCVHWM, PEER_HWM)
        router.setsockopt(zmq.MAXMSGSIZE, max_bytes)  # of one frame
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, server_secret)
        router.setsockopt(zmq.ZAP_DOMAIN, _CURVE_DOMAIN)
        set_heartbeats(router)

    def _bind(self, host: str, port: int) -> None:
        try:
            self._router.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            holder = holder_of_port(port) if error.errno == zmq.EADDRINUSE else None
            by = f"; it is in use by {holder}" if holder else ""
            raise LaunchError(
                f"cannot listen on {host} port {port}: {error.strerror}{by}; choose another --rpc-port, or 0 for a free one"
            ) from error

    def has_input(self) -> bool:
        """Whether `receive` has something to do."""
        return any(int(one.getsockopt(zmq.EVENTS)) & zmq.POLLIN for one in self.sockets)

    def receive(self, max_messages: int) -> list[tuple[bytes, ZmtpMessage]]:
        """Messages with the names of their senders. New connections are decided on, too."""
        self._answer_zap()
        received = []
        for _ in range(max_messages):
            try:
                peer = self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            received.append((TCP_NAME + peer, self._message()))
        return received

    def _message(self) -> ZmtpMessage:
        """The message whose sender was just read. Frames of a message arrive together."""
        num_frames, num_bytes, frame = 0, 0, b""
        while self._router.getsockopt(zmq.RCVMORE):
            part = self._router.recv(zmq.NOBLOCK)
            num_frames, num_bytes = num_frames + 1, num_bytes + len(part)
            frame = part if num_frames == 1 else b""
        return ZmtpMessage(num_frames, num_bytes, frame)

    def _answer_zap(self) -> None:
        """Decide on new connections (ZMQ RFC 27): CURVE with the one allowed client key, nothing else."""
        while True:
            try:
                parts = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, sequence, domain, mechanism = (
                (parts[0], parts[1], parts[2], parts[5]) if len(parts) >= 6 else (b"1.0", b"", b"", b"")
            )
            accepted = domain == _CURVE_DOMAIN and mechanism == b"CURVE" and len(parts) == 7 and parts[6] == self._allowed_key
            verdict = [b"200", b"OK"] if accepted else [b"400", b"this client key is not allowed"]
            self._zap.send_multipart([version, sequence, *verdict, b"client" if accepted else b"", b""])

    def send(self, peer: bytes, body: bytes) -> bool:
        """Send a message; False if the client has not read so much that nothing more can be sent. Raises Gone."""
        try:
            self._router.send(peer[len(TCP_NAME) :], _ADDRESS)  # what takes an address also takes the frame that belongs to it
            self._router.send(body, _FRAME)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise Gone from None
        return True

    def close(self, linger_s: float) -> None:
        """Close it; what is under way to clients that read gets at most `linger_s`."""
        self._router.setsockopt(zmq.LINGER, round(linger_s * 1000))
        self._router.close()
        self._zap.close()
        self._context.term()
