"""A program with type errors, each marked in its line."""

from bodies import chat_request

from lmx_lab.client import DaemonClient, LabClient


def wrong(lab: LabClient, daemon: DaemonClient) -> None:
    lab.chat("hi")  # wrong
    lab.stream(chat_request("hi"), over="pigeon")  # wrong
    lab.load("tiny", progress=len)  # wrong
    daemon.session(1)  # wrong
    daemon.session("s").run("hi", on_permission="perhaps")  # wrong
    daemon.session("s").change(titel="t")  # wrong
    daemon.decide("p", "maybe")  # wrong
    for event in daemon.events():
        print(event.nothing)  # wrong
