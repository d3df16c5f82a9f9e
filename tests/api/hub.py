"""A stand-in for the hub on this machine: one model, as snapshot downloads ask for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.web import serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(name: str, folder: Path, breaks_at: int | None = None) -> Iterator[tuple[str, list[str]]]:
    """Serve ``folder`` as ``name``: yields the address, and the files that were asked for, as they are. With ``breaks_at`` the
    first large file ends there once.
    """
    asked: list[str] = []
    broken: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def _json(self, value: object, code: int = 200, **headers: str) -> None:
            body = json.dumps(value).encode()
            self.send_response(code)
            for key, told in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
                self.send_header(key.replace("_", "-"), told)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _file(self, path: Path) -> None:
            content = path.read_bytes()
            first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
            self.send_response(206 if first else 200)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(content) - first))
            if first:
                self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            if self.command == "HEAD":
                return
            asked_for = path.relative_to(folder).as_posix()
            asked.append(f"{asked_for} from {first}" if first else asked_for)
            if breaks_at is not None and len(content) > breaks_at and not broken:
                broken.append(asked_for)
                self.wfile.write(content[:breaks_at])
                self.close_connection = True
                return
            self.wfile.write(content[first:])

        def do_GET(self) -> None:
            files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
            if self.path.startswith(f"/api/models/{name}/revision/"):
                siblings = [{"rfilename": each} for each in files]
                self._json(
                    {
                        "_id": "1",
                        "id": name,
                        "modelId": name,
                        "sha": COMMIT,
                        "siblings": siblings,
                        "tags": [],
                        "private": False,
                        "downloads": 0,
                    }
                )
            elif self.path.startswith(f"/api/models/{name}/tree/"):
                self._json(
                    [
                        {"type": "file", "path": each, "size": (folder / each).stat().st_size, "oid": "0" * 40}
                        for each in files
                    ]
                )
            elif self.path.startswith(f"/{name}/resolve/"):
                path = folder / self.path.partition("/resolve/")[2].partition("/")[2]
                self._file(path) if path.is_file() else self._json({}, 404, X_Error_Code="EntryNotFound")
            else:
                self._json({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")

        do_HEAD = do_GET

    with serving(Handler) as url:
        yield url, asked
