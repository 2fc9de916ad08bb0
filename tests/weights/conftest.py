import http.server
import threading
from pathlib import Path
from urllib.parse import unquote

import pytest

from bagrpo.config import MeshConfig
from bagrpo.sharding import make_mesh


@pytest.fixture
def mesh():
    return make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))


@pytest.fixture
def served(tmp_path):
    """A folder on an HTTP server with byte ranges: (folder, address, bytes sent by first part).

    An address may begin with any one folder name, under which its bytes are counted.
    """
    sent = {}

    class Server(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            _, client, *rest = unquote(self.path).split("/")
            path = Path(tmp_path, *rest)
            whole = path.read_bytes() if path.is_file() else None
            if whole is None:
                return self.answer(404, b"")
            wanted = self.headers["Range"]
            if wanted is None:
                return self.answer(200, whole, client)
            first, last = wanted.removeprefix("bytes=").split("-")
            first, last = int(first), min(int(last or len(whole)), len(whole) - 1)
            if first > last:
                return self.answer(416, b"", size=f"bytes */{len(whole)}")
            size = f"bytes {first}-{last}/{len(whole)}"
            return self.answer(206, whole[first : last + 1], client, size)

        def answer(self, status, body, client="", size=""):
            sent[client] = sent.get(client, 0) + len(body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"1"')
            if size:
                self.send_header("Content-Range", size)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])  # poll interval
    thread.start()
    yield tmp_path, f"http://127.0.0.1:{server.server_port}", sent
    server.shutdown()
    server.server_close()
    thread.join()
