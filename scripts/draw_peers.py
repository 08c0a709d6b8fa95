"""Draw the peer protocol from its own tables, as Mermaid, into docs/peers.md.

Every arrow is a message that two `SessionState` objects have really taken, one sending and one receiving: a
step that the tables do not have ends the drawing with an error. Usage: draw_peers.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from pdoffload.layout import make_key
from pdoffload.p2p.messages import (
    AbortAck,
    AbortFetch,
    Connect,
    ConnectAck,
    Disconnect,
    Fetch,
    Lookup,
    LookupResp,
    Message,
    TransferDone,
)
from pdoffload.p2p.session import PULL_STEPS, SERVE_STEPS, SessionState

PAGE = Path(__file__).parent.parent / "docs" / "peers.md"
KEY = make_key(bytes(32), 0)

CONNECT = Connect(
    peer_id="decoder:5710",
    agent_metadata=b"metadata",
    base_addr=0,
    num_blocks=1,
    block_len=1,
    config_fingerprint="",
    hash_seed="",
)
HELLO: list[tuple[str, Message | str]] = [
    ("C", CONNECT),
    ("P", ConnectAck("prefiller:5710")),
]
STORIES: dict[str, list[tuple[str, Message | str]]] = {
    "pull": [
        *HELLO,
        ("-", "only for remote_kv_source"),
        ("C", Lookup("id", (KEY,), 0)),
        ("P", LookupResp("id", (KEY,), (True,))),
        ("-", "for both"),
        ("C", Fetch("id", (KEY,), (0,), 0)),
        ("-", "the producer NIXL-WRITEs its slots into the consumer's slots"),
        ("P", TransferDone("id", True, 0)),
        ("-", "the consumer compares every chunk with its checksum"),
        ("C", Fetch("id", (), (), 1)),
        ("-", "the request is over: what is still held for it is let go"),
    ],
    "late": [
        *HELLO,
        ("C", Fetch("id", (KEY,), (0,), 0)),
        ("-", "load_timeout_s passes"),
        ("C", AbortFetch("id", 0)),
        ("P", AbortAck("id", 0)),
        ("-", "without an answer in abort_timeout_s: a new receiving agent"),
        ("C", CONNECT),
        ("P", ConnectAck("prefiller:5710")),
        ("-", "the old agent is closed: nothing can land in the slots any more"),
        ("C", Disconnect("shutting down")),
    ],
}


def sequence(story: list[tuple[str, Message | str]]) -> Iterator[str]:
    """One story, with each side's state after each message where it changed."""
    consumer, producer = SessionState(), SessionState()
    yield "```mermaid"
    yield "sequenceDiagram"
    yield "    participant C as consumer"
    yield "    participant P as producer"
    seen = {"C": "", "P": ""}
    for side, step in story:
        if isinstance(step, str):
            yield f"    Note over C,P: {step}"
            continue
        sender, receiver = (consumer, producer) if side == "C" else (producer, consumer)
        sender.sent(step)
        receiver.received(step)
        other = "P" if side == "C" else "C"
        yield f"    {side}->>{other}: {step.__struct_config__.tag}"
        for name, state in (("C", _asking(consumer)), ("P", _answering(producer))):
            if seen[name] != state:
                seen[name] = state
                yield f"    Note over {name}: {state}"
    yield "```"


def states(steps: dict, last: str) -> Iterator[str]:
    """One round's table as a state diagram."""
    yield "```mermaid"
    yield "stateDiagram-v2"
    first = next(iter(steps))[0]
    yield f"    [*] --> {first.value}"
    for (before, event), after in steps.items():
        yield f"    {before.value} --> {after.value}: {event.value}"
    yield f"    {last} --> [*]"
    yield "```"


def _asking(state: SessionState) -> str:
    return "closed" if state.closed else state.asking.value


def _answering(state: SessionState) -> str:
    return "closed" if state.closed else state.answering.value


def drawings() -> dict[str, str]:
    """Every drawing by the name of its place in the page."""
    made = {name: "\n".join(sequence(story)) for name, story in STORIES.items()}
    made["pull-states"] = "\n".join(states(PULL_STEPS, "ended"))
    made["serve-states"] = "\n".join(states(SERVE_STEPS, "ended"))
    return made


def redrawn(page: str) -> str:
    """`page` with every drawing between its marks made anew; `ValueError` where a mark is missing."""
    for name, drawing in drawings().items():
        begin, end = f"<!-- drawing {name} -->\n", f"\n<!-- end of drawing {name} -->"
        head, rest = page.split(begin)
        tail = rest.split(end)[1]
        page = head + begin + drawing + end + tail
    return page


def main() -> int:
    """Write the page anew, or with --check say whether it is as it should be."""
    page = PAGE.read_text()
    new = redrawn(page)
    if "--check" in sys.argv:
        return int(new != page)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
