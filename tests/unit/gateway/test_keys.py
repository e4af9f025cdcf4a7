"""Several API keys: the file they come from, who is let in, and that what is kept for one is nobody else's."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kog_dist.config import API_KEY_FORM, LaunchConfig
from kog_dist.errors import ConfigError
from kog_dist.gateway.body_reader import SMALL_BYTES
from kog_dist.gateway.keys import MAX_FILE_BYTES, MAX_KEYS, ApiKeys, check_key, keys_of, read_key_file, read_keys, write_keys
from kog_dist.model.chat_template import RenderedChat
from kog_dist.model.template_trials import TemplateFacts
from tests.unit.gateway.scripted_engine import JSON, RunningGateway, ScriptedEngine, client, gateway, says, until

ALICE, BOB = "alice-alice-alice", "bob-bob-bob-bob"
PADDING = " " * SMALL_BYTES  # a body with it is read in another process
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "def add(a, b):"},
    "/v1/responses": {"input": "hi"},
}


# ---- the file ----
@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def written(text: str, mode: int = 0o600) -> Path:
        path = tmp_path / "keys"
        path.write_text(text, encoding="utf-8")
        path.chmod(mode)
        return path

    return written


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("abcdefgh", ["abcdefgh"]),
        ("  abcdefgh \r\n", ["abcdefgh"]),
        ("abcdefgh\nABCDEFGH\n", ["abcdefgh", "ABCDEFGH"]),
        ("# of Alice\nabcdefgh\n\n \n  #of Bob\n\tabcdefgi", ["abcdefgh", "abcdefgi"]),
        ("abcdefg#\n", ["abcdefg#"]),
        ("x" * 1024 + "\n" + "y" * 8, ["x" * 1024, "y" * 8]),
    ],
)
def test_a_file_has_a_key_in_each_line(write: Callable[..., Path], text: str, found: list[str]) -> None:
    path = write(text)
    assert read_key_file(path) == tuple(found)
    assert keys_of(LaunchConfig(api_key_file=str(path))) == tuple(found)


def test_a_key_of_the_settings_is_asked_for() -> None:
    assert keys_of(LaunchConfig(api_key=ALICE)) == (ALICE,)
    assert keys_of(LaunchConfig()) == ()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the API key file {} has no key; write one per line, and comments behind #"),
        ("\n# abcdefgh\n#abcdefgh\n", "the API key file {} has no key; write one per line, and comments behind #"),
        (
            "abcdefgh\n\nsecret\n",
            "line 3 of the API key file {} must be {FORM}, got 6",
        ),
        (
            "secret-1 # of Bob\n",
            "line 1 of the API key file {} must be {FORM}, got 17",
        ),
        (
            "secret-1\x0bsecret-2",
            "line 1 of the API key file {} must be {FORM}, got 17",
        ),
        ("x" * 1025, "line 1 of the API key file {} must be {FORM}, got 1025"),
        ("secret-1\nsecret-2\n# again\nsecret-1 \n", "line 4 of the API key file {} repeats the key of line 1; remove one"),
        ("secret-ü-secret\n", "the API key file {} is not ASCII text"),
        ("#" * (MAX_FILE_BYTES + 1), f"the API key file {{}} cannot be read: it has more than {MAX_FILE_BYTES} bytes"),
        (
            "".join(f"secret-{number}\n" for number in range(MAX_KEYS + 1)),
            f"the API key file {{}} has {MAX_KEYS + 1} keys, at most {MAX_KEYS} are taken",
        ),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_sentence(write: Callable[..., Path], text: str, sentence: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        read_key_file(path)
    said = str(caught.value)
    assert said.startswith(sentence.format(path, FORM=API_KEY_FORM))
    assert "\n" not in said
    assert "secret" not in said.replace(str(path), "")


def test_a_file_that_others_may_read_is_refused(write: Callable[..., Path], tmp_path: Path) -> None:
    for mode in (0o644, 0o640, 0o604, 0o620):
        with pytest.raises(ConfigError, match=r"holds API keys and other users may read it \(mode \d+\); chmod 600 it"):
            read_key_file(write("abcdefgh\nabcdefgi\n", mode))
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        read_key_file(tmp_path / "none")


def test_a_file_may_be_full(write: Callable[..., Path]) -> None:
    written = [f"key-{number:04}" for number in range(MAX_KEYS)]
    text = "\n".join(written)
    assert read_key_file(write(text + "\n" * (MAX_FILE_BYTES - len(text)))) == tuple(written)


def test_keys_reach_the_process_whatever_their_number() -> None:
    for keys in (("abcdefgh",), ("abcdefgh", "abcdefgi"), tuple(f"{number:01024}" for number in range(MAX_KEYS))):
        assert read_keys(write_keys(keys)) == keys
    assert write_keys(()) == -1
    assert read_keys(-1) == ()


def test_what_is_no_key_is_not_shown() -> None:
    for wrong in ("short", "with blank in it", "ä" * 9, "x" * 2000):
        with pytest.raises(ConfigError) as caught:
            check_key(wrong, "--api-key")
        assert wrong not in str(caught.value)


# ---- who is let in, to what ----
def test_each_key_has_a_scope_of_its_own_where_there_are_several() -> None:
    several = ApiKeys([ALICE, BOB])
    scopes = [several.scope_of(ALICE.encode()), several.scope_of(BOB.encode())]
    assert len(set(scopes)) == 2
    assert all(scopes)
    assert ApiKeys([BOB, "another-key", ALICE]).scope_of(ALICE.encode()) == scopes[0], "the file's order makes no difference"
    for known in (ApiKeys([ALICE]), ApiKeys([ALICE, BOB], share_prefixes=True)):
        assert known.scope_of(ALICE.encode()) == ""
    for known in (several, ApiKeys([ALICE]), ApiKeys()):
        for wrong in (b"", ALICE.encode() + b"x", ALICE.encode()[:-1], ALICE.encode() + b"\n" + BOB.encode(), b"\xff"):
            assert known.scope_of(wrong) is None
    told = str(scopes) + repr(several)
    assert not any(piece in told for key in (ALICE, BOB) for piece in (key, hashlib.sha256(key.encode()).hexdigest()))


def test_a_key_is_compared_with_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    known, compared, really = ApiKeys([ALICE, BOB, "carol-carol"]), list[bytes](), hmac.compare_digest

    def compare(given: bytes, other: bytes) -> bool:
        compared.append(other)
        return really(given, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for given in (ALICE, BOB, "carol-carol", "nobody-nobody"):
        compared.clear()
        known.scope_of(given.encode())
        assert len(set(compared)) == len(compared) == 3, given


# ---- behind HTTP ----
@pytest.fixture(scope="module")
def separate(shared_engine: ScriptedEngine, folder: Path) -> Iterator[RunningGateway]:
    with gateway(shared_engine, folder, keys=[ALICE, BOB]) as made:
        yield made


def salt_of(engine: ScriptedEngine, http: httpx.Client, key: str, path: str, *, padding: str = "", **fields: Any) -> str | None:
    """The salt that the engine sees."""
    engine.received.clear()
    content = json.dumps({**BODIES[path], **fields}) + padding
    answer = http.post(path, content=content, headers={**JSON, "authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    assert key not in answer.text
    assert key not in str(answer.headers)
    (received,) = engine.received
    salt = received.message.cache_salt
    assert salt is None or salt not in answer.text
    return salt


@pytest.mark.parametrize("path", BODIES)
def test_keys_and_salts_separate_each_by_itself(
    separate: RunningGateway, shared_engine: ScriptedEngine, engine: ScriptedEngine, path: str
) -> None:
    engine.on_generate = says("x")
    with client(separate) as http:
        asked = list(itertools.product((ALICE, BOB), (None, "mine", "yours")))
        salts = [salt_of(engine, http, key, path, cache_salt=salt) for key, salt in asked]
        assert len(set(salts)) == len(asked)
        assert all(salts)
        again = [salt_of(engine, http, key, path, padding=PADDING, cache_salt=salt) for key, salt in asked]
        assert again == salts, "large bodies are read in another process"
        stolen = [salt_of(engine, http, BOB, path, cache_salt=salt) for salt in salts]
        assert not set(stolen) & set(salts), "who sees a salt cannot use it with another key"
        assert salt_of(engine, http, ALICE, path, user="u", stream=True) == salts[0]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("keys", "shares"), [([ALICE], False), ([ALICE, BOB], True)])
def test_without_separation_the_salt_is_the_clients_own(
    shared_engine: ScriptedEngine, folder: Path, engine: ScriptedEngine, path: str, keys: list[str], shares: bool
) -> None:
    engine.on_generate = says("x")
    with gateway(shared_engine, folder, keys=keys, share_prefixes=shares) as made, client(made) as http:
        for key in keys:
            assert salt_of(engine, http, key, path) is None
            assert salt_of(engine, http, key, path, padding=PADDING, cache_salt="mine") == "mine"


def test_kept_texts_are_found_by_the_key_s_salt(
    separate: RunningGateway, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat template's text is encoded within the scope that the engine sees."""
    scopes: list[str] = []

    class Template:
        source = tool_source = ""
        facts = TemplateFacts(shows_tools=True)

        def render(self, messages: Any, **_: Any) -> RenderedChat:
            return RenderedChat(messages[0]["content"])

    def encode_chat(text: str, scope: str = "", foreign: object = ()) -> list[int]:
        scopes.append(scope)
        return [1, 2, 3]

    until(lambda: separate.service.served is not None)
    served = separate.service.served
    assert served is not None
    assert served.tokenizer is not None
    monkeypatch.setattr(separate.service, "served", served.__class__(**{**vars(served), "chat_template": Template()}))
    monkeypatch.setattr(served.tokenizer, "encode_chat", encode_chat)
    engine.on_generate = says("x")
    with client(separate) as http:
        for path in ("/v1/chat/completions", "/v1/responses"):
            salts = [salt_of(engine, http, key, path) for key in (ALICE, BOB)]
            assert scopes == salts
            scopes.clear()


def test_other_keys_are_refused_and_nothing_tells_a_key(separate: RunningGateway, engine: ScriptedEngine) -> None:
    engine.on_generate = says("x")
    with client(separate) as http:
        for key in ("wrong-wrong-wrong", f"{ALICE}\t{BOB}", ALICE[:-1]):
            assert http.post("/v1/completions", json={"prompt": "x"}, headers={"x-api-key": key}).status_code == 401
        seen = [salt_of(engine, http, key, "/v1/completions") for key in (ALICE, BOB)]
        told = "".join(http.get(path, headers={"x-api-key": BOB}).text for path in ("/metrics", "/kog/info", "/openapi.json"))
    told += separate.log_path.read_text(encoding="utf-8")
    for key in (ALICE, BOB):
        assert key not in told
        assert hashlib.sha256(key.encode()).hexdigest() not in told
        assert str(ApiKeys([ALICE, BOB]).scope_of(key.encode())) not in told
    assert not any(salt in told for salt in seen if salt)


def test_a_response_of_another_key_is_as_unknown_as_any(separate: RunningGateway, engine: ScriptedEngine) -> None:
    """Nothing is stored: neither key can ask for a response by its id, or stop one."""
    engine.on_generate = says("x")
    with client(separate) as http:
        made = http.post("/v1/responses", json={"input": "hi"}, headers={"x-api-key": ALICE}).json()["id"]
        for key in (ALICE, BOB):
            told = []
            for name in (made, "resp_" + "0" * 32):
                body = {"input": "hi", "previous_response_id": name}
                answers = [
                    http.get(f"/v1/responses/{name}", headers={"x-api-key": key}),
                    http.delete(f"/v1/responses/{name}", headers={"x-api-key": key}),
                    http.post(f"/v1/responses/{name}/cancel", headers={"x-api-key": key}),
                    http.post("/v1/responses", json=body, headers={"x-api-key": key}),
                ]
                told.append([(answer.status_code, answer.text.replace(name, "ID")) for answer in answers])
            assert told[0] == told[1]
            assert [status for status, _ in told[0]] == [404, 404, 404, 400]
