"""transformers' `generate` behind /v1/completions and /v1/chat/completions, as plain as can be. Needs nothing of kog_dist.

One request at a time, by one thread, since what torch records of a compiled model is that thread's; others wait.
`--compiled`: a cache of fixed size, with which `generate` compiles the model on a GPU.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NAME = "transformers"
BEFORE = 8  # tokens in front of new ones, by which it is known whether these begin with a blank


class SentText:
    """A streamer: what is new of the text goes out with each token."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.is_prompt, self.num_sent = True, 0
        self.ids: list[int] = []

    def put(self, value: Any) -> None:
        """The prompt first, then new tokens."""
        if self.is_prompt:
            self.is_prompt = False
            return
        self.ids += value.reshape(-1).tolist()
        self.send(is_last=False)

    def end(self) -> None:
        """Nothing comes any more."""
        self.send(is_last=True)

    def send(self, *, is_last: bool) -> None:
        """What is new of the text, unless it ends within a character."""
        first = max(0, self.num_sent - BEFORE)
        before = self.tokenizer.decode(self.ids[first : self.num_sent], skip_special_tokens=True)
        text = self.tokenizer.decode(self.ids[first:], skip_special_tokens=True)
        if is_last or not text.endswith("\ufffd"):
            self.num_sent = len(self.ids)
            if len(text) > len(before):
                self.write(text[len(before) :])


class GeneratingModel:
    """The model, its tokenizer, and how it generates."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.without_gradients = torch.inference_mode
        path = Path(options.model)
        names: dict[str, object] = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        folder = path.parent if names else path
        if options.threads:
            torch.set_num_threads(options.threads)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **names)
        dtype = torch.float32 if options.device == "cpu" else "auto"
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **names).to(options.device).eval()
        self.more: dict[str, object] = {"prompt_lookup_num_tokens": options.lookup} if options.lookup else {}
        if options.compiled:
            self.more |= {"cache_implementation": "static"}
        self.thread = ThreadPoolExecutor(1)

    def prompt_of(self, body: Mapping[str, object]) -> Any:
        """Ids of the prompt."""
        if "messages" in body:
            return self.tokenizer.apply_chat_template(
                body["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        return self.tokenizer(body["prompt"], return_tensors="pt")

    def generate(self, body: Mapping[str, Any], write: Callable[[str], None]) -> tuple[int, int, str]:
        """Tokens of prompt and answer, and why it ended."""
        return self.thread.submit(self._generate, body, write).result()

    def _generate(self, body: Mapping[str, Any], write: Callable[[str], None]) -> tuple[int, int, str]:
        prompt = self.prompt_of(body).to(self.model.device)
        most = body.get("max_tokens", 128)
        events = SentText(self.tokenizer, write)
        least = {"min_new_tokens": most} if body.get("ignore_eos") else {}
        with self.without_gradients():
            self.model.generate(**prompt, max_new_tokens=most, do_sample=False, streamer=events, **least, **self.more)
        return prompt["input_ids"].shape[1], len(events.ids), "length" if len(events.ids) >= most else "stop"


def handler_of(model: GeneratingModel) -> type[BaseHTTPRequestHandler]:
    """Of requests to one model."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": NAME}]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            is_chat = "messages" in body
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            self.close_connection = True

            def send(**chunk: object) -> None:
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                self.wfile.flush()

            def write(text: str) -> None:
                said = {"delta": {"content": text}} if is_chat else {"text": text}
                send(choices=[{"index": 0, "finish_reason": None, **said}])

            try:
                num_prompt, num_answer, reason = model.generate(body, write)
            except Exception as error:  # of libraries: who asked is told
                send(error={"message": f"{type(error).__name__}: {error}"})
                raise
            send(choices=[{"index": 0, "finish_reason": reason, **({"delta": {}} if is_chat else {"text": ""})}])
            send(choices=[], usage={"prompt_tokens": num_prompt, "completion_tokens": num_answer})
            self.wfile.write(b"data: [DONE]\n\n")

    return Handler


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--lookup", type=int, default=0, help="tokens of a draft, looked up in the prompt")
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    model = GeneratingModel(options)
    ThreadingHTTPServer(("127.0.0.1", options.port), handler_of(model)).serve_forever()


if __name__ == "__main__":
    main()
