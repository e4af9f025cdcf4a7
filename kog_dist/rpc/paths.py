"""Names of the files through which clients find an engine, in its instance folder. Needs neither zmq nor msgpack."""

from __future__ import annotations

from typing import Final

SOCKET_NAME: Final = "rpc.sock"
ACCESS_NAME: Final = "rpc-access.json"  # address and keys of the TCP port, for its one client; mode 0600
