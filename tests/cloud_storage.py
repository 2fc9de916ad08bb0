"""A stand-in of Cloud Storage: the part of its JSON API that bagrpo's libraries call, in memory.

TensorStore finds it by TENSORSTORE_GCS_HTTP_URL, gcsfs and google-cloud-storage by
STORAGE_EMULATOR_HOST. There is no gRPC, by which gcsfs would ask for a bucket's kind.
"""

import contextlib
import http.server
import itertools
import json
import re
import sys
import threading
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "bucket"
PAGE = 7
"""Objects of one answer to a listing: so few that there are several."""


class Storage(http.server.ThreadingHTTPServer):
    """The server and what it holds: (generation, bytes) of each object by name."""

    daemon_threads = True
    block_on_close = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.uploads: dict[str, tuple[str, bytearray, str | None]] = {}
        self.generations = itertools.count(1)
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.environment = {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",  # TensorStore looks for no other then.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # That is asked by gRPC.
            "NO_GCE_CHECK": "true",
        }

    def handle_error(self, request, client_address):
        """A client that has enough closes its connection, which is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def names(self, prefix: str = "") -> list[str]:
        with self.lock:
            return sorted(name for name in self.objects if name.startswith(prefix))

    def text(self, name: str) -> str:
        """An object's text; empty without the object."""
        return self.objects.get(name, (0, b""))[1].decode()

    def put(self, name: str, content: bytes, generation: str | None = None) -> dict | None:
        """Writes an object if its generation is the one expected, 0 for none; returns what it is.

        The same lock is held while a generation is looked at and while an object is replaced.
        """
        with self.lock:
            if generation is not None and self.objects.get(name, (0,))[0] != int(generation):
                return None
            self.objects[name] = next(self.generations), bytes(content)
            return self.describe(name)

    def describe(self, name: str) -> dict:
        generation, content = self.objects[name]
        return {
            "kind": "storage#object",
            "bucket": BUCKET,
            "name": name,
            "size": str(len(content)),
            "generation": str(generation),
            "metageneration": "1",
            "updated": "2026-01-01T00:00:00Z",
            "timeCreated": "2026-01-01T00:00:00Z",
        }

    def copy_to(self, prefix: str, folder: Path) -> Path:
        """Copies what lies under a prefix into a local folder, and returns that."""
        for name in self.names(f"{prefix}/"):
            path = folder / name.removeprefix(f"{prefix}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.objects[name][1])
        return folder

    def copy_from(self, folder: Path, prefix: str) -> str:
        """Copies a local folder's files to beneath a prefix, and returns its address."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())
        return f"gs://{BUCKET}/{prefix}"


class Answer(http.server.BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # Head and body in one packet.
    server: Storage

    def log_message(self, *arguments):
        pass

    def answer(self, status, content=b"", **headers):
        if isinstance(content, dict):
            content, headers["Content_Type"] = json.dumps(content).encode(), "application/json"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def fail(self, status, said):
        self.answer(status, {"error": {"code": status, "message": said}})

    def found(self, described):
        if described is None:
            self.fail(412, "conditionNotMet")
        else:
            self.answer(200, described)

    def read(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def do(self):
        body, parts = self.read(), urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path == "/batch/storage/v1":
            return self.batch(body)
        match = re.fullmatch(r"(?:/\w+)?/storage/v1/b/([^/]+)(?:/o(?:/(.+))?)?", parts.path)
        if match is None:
            return self.fail(501, f"the stand-in has no {self.command} {self.path}")
        if match[1] != BUCKET:
            return self.fail(404, "The specified bucket does not exist.")
        if parts.path.startswith("/upload/"):
            return self.upload(body)
        if match[2] is not None:
            return self.object(unquote(match[2]))
        if parts.path.endswith("/o"):
            return self.list()
        return self.answer(200, {"kind": "storage#bucket", "name": BUCKET, "id": BUCKET})

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do

    def object(self, name):
        with self.server.lock:
            if name not in self.server.objects:
                return self.fail(404, f"No such object: {BUCKET}/{name}")
            generation, content = self.server.objects[name]
            if self.query.get("ifGenerationMatch", str(generation)) != str(generation):
                return self.fail(412, "conditionNotMet")
            if self.command == "DELETE":
                del self.server.objects[name]
                return self.answer(204)
            described = self.server.describe(name)
        if self.query.get("ifGenerationNotMatch") == str(generation):
            return self.answer(304)
        if self.query.get("alt") != "media":
            return self.answer(200, described)
        headers = {"X_Goog_Generation": generation, "Content_Type": "application/octet-stream"}
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            return self.answer(200, content, **headers)
        if not span[1]:
            start, stop = max(0, len(content) - int(span[2])), len(content)
        else:
            start, stop = int(span[1]), min(int(span[2] or 1 << 60) + 1, len(content))
        if start >= len(content):
            return self.fail(416, "Requested range not satisfiable")
        headers["Content_Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        return self.answer(206, content[start:stop], **headers)

    def list(self):
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter")
        start = max(self.query.get("startOffset", ""), self.query.get("pageToken", ""))
        end = self.query.get("endOffset")
        items, prefixes = [], []
        with self.server.lock:
            for name in sorted(self.server.objects):
                if not name.startswith(prefix) or (end and name >= end):
                    continue
                inner = name[len(prefix) :]
                if delimiter and delimiter in inner:
                    folder = prefix + inner.split(delimiter)[0] + delimiter
                    if folder >= start and folder not in prefixes:
                        prefixes.append(folder)
                elif name >= start:
                    items.append(self.server.describe(name))
        found = sorted([*prefixes, *(item["name"] for item in items)])
        page = set(found[: int(self.query.get("maxResults", PAGE))][:PAGE])
        answer = {
            "kind": "storage#objects",
            "items": [item for item in items if item["name"] in page],
            "prefixes": [folder for folder in prefixes if folder in page],
        }
        if len(found) > len(page):
            answer["nextPageToken"] = found[len(page)]
        self.answer(200, answer)

    def upload(self, body):
        kind, generation = self.query.get("uploadType"), self.query.get("ifGenerationMatch")
        if "upload_id" in self.query:
            return self.resume(body)
        if kind == "media":
            return self.found(self.server.put(self.query["name"], body, generation))
        if kind == "multipart":
            boundary = re.search(r"boundary=\"?([^\"]+)", self.headers["Content-Type"])[1].encode()
            _, described, content, _ = re.split(rb"\r?\n?--" + re.escape(boundary), body)
            described, content = (
                re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1] for part in (described, content)
            )
            return self.found(self.server.put(json.loads(described)["name"], content, generation))
        name = self.query.get("name") or json.loads(body)["name"]
        number = str(next(self.server.generations))
        self.server.uploads[number] = name, bytearray(), generation
        where = f"{self.server.url}/upload/storage/v1/b/{BUCKET}/o?upload_id={number}"
        return self.answer(200, Location=where)

    def resume(self, body):
        """A part of an upload that comes in several; the object is there after the last one."""
        name, content, generation = self.server.uploads[self.query["upload_id"]]
        content += body
        if self.headers["Content-Range"].endswith("/*"):
            return self.answer(308, Range=f"bytes=0-{len(content) - 1}")
        return self.found(self.server.put(name, bytes(content), generation))

    def batch(self, body):
        """Several objects to delete."""
        answers = []
        for name in re.findall(rf"DELETE /storage/v1/b/{BUCKET}/o/(\S+) HTTP", body.decode()):
            with self.server.lock:
                gone = self.server.objects.pop(unquote(name), None) is not None
            status = "204 No Content" if gone else '404 Not Found\r\n\r\n{"error": {"code": 404}}'
            answers.append(f"--part\r\nContent-Type: application/http\r\n\r\nHTTP/1.1 {status}\r\n")
        text = "\r\n".join([*answers, "--part--"])
        self.answer(200, text.encode(), Content_Type="multipart/mixed; boundary=part")


@contextlib.contextmanager
def serve():
    """A bucket named `bucket`, empty, while the context lasts."""
    storage = Storage()
    thread = threading.Thread(target=storage.serve_forever, daemon=True)
    thread.start()
    try:
        yield storage
    finally:
        storage.shutdown()
        storage.server_close()
        thread.join()
