"""An engine for tests of `kog-bench peers`: answers every prompt with TEXT, and streams it as OpenAI does. PORT KIND TEXT...

KIND: plain; chats-fail (500 to each chat); late (ready only after three looks); deaf (503 for ever).
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT, KIND, TEXT = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
looks = 0
TOKEN_S = 0.02  # what a token takes


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def reply(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        global looks
        if self.path == "/health" and KIND in ("late", "deaf"):
            looks += 1
            self.reply(503 if KIND == "deaf" or looks < 3 else 200, "text/plain", b"")
        elif self.path == "/health":
            self.reply(404, "text/plain", b"")
        else:
            self.reply(200, "application/json", json.dumps({"data": [{"id": "stub"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if KIND == "chats-fail" and "messages" in body:
            self.reply(500, "application/json", json.dumps({"error": {"message": "no chats here"}}).encode())
            return
        words = TEXT[: body["max_tokens"]]
        said = [{"delta": {"content": word}} if "messages" in body else {"text": word} for word in words]
        chunks: list[dict[str, Any]] = [{"choices": [{**one, "finish_reason": None}]} for one in said]
        chunks.append({"choices": [{"text": "", "delta": {}, "finish_reason": "length"}]})
        chunks.append({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": len(words)}})
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        for payload in (*map(json.dumps, chunks), "[DONE]"):
            self.wfile.write(f"data: {payload}\n\n".encode())
            self.wfile.flush()
            time.sleep(TOKEN_S)


if __name__ == "__main__":
    print("stub starts", flush=True)
    if KIND == "ends":
        sys.exit("a model of four legs is not supported")
    ThreadingHTTPServer(("127.0.0.1", PORT), Answers).serve_forever()
