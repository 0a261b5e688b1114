"""Test the events panel without a browser: rows, frames, decisions, outages, many events."""

import json
import time

import pytest

from lmx_lab.client.subscription import ConnectionState
from lmx_lab.errors import PermissionNotFoundError, UnauthorizedError, UnreachableError
from lmx_lab.panels.event_log import COLUMNS, MAX_ROWS, MAX_TURN_CHARACTERS, EventRows, RowFilter, SessionTracker
from lmx_lab.panels.events import WINDOW_ROWS, EventsPanel
from lmx_lab.panels.layout import compose_panels
from lmx_lab.panels.workbench import Workbench
from tests.support.panels import LIVE, Flood, Reader, Refused, ScriptedDaemon, ScriptedLog, permission_record

LOST = ConnectionState(state="waiting", attempts=1, retry_in_s=0.4, error=UnreachableError("no answer"))


@pytest.fixture
def daemon(workbench):
    daemon = ScriptedDaemon()
    workbench.follow_events(daemon)
    return daemon


@pytest.fixture
def reader(workbench, daemon):
    reader = Reader(EventsPanel(workbench))
    reader.give(daemon.given, LIVE)
    reader.until(lambda panel: panel.connection["state"] == "live")
    return reader


@pytest.fixture
def log():
    return ScriptedLog()


def kinds(panel):
    return [row["kind"] for row in panel.frame["rows"]]


def texts(panel):
    return [row["text"] for row in panel.frame["rows"]]


def test_events_are_rows_in_their_order(reader, daemon, log):
    queued = {"message": {"role": "user", "content": "Is it sunny?"}, "ahead": 0}
    reader.give(
        daemon.given,
        log.created(),
        log.event("turn.queued", queued),
        log.event("tool.start", {"call_id": "c", "name": "weather", "arguments": {"city": "Ulm"}}),
        log.event("turn.new_kind", {"so": "so"}),
        log.done("Yes."),
    )
    reader.until(lambda panel: len(panel.frame["rows"]) == 5)
    assert kinds(reader.panel) == ["session.created", "turn.queued", "tool.start", "turn.new_kind", "turn.done"]
    assert texts(reader.panel) == [
        "Weather · any model · idle",
        "user: Is it sunny? · 0 ahead of it",
        'weather(city="Ulm")',
        '{"so": "so"}',
        "end · 3 tokens · 20.0 tok/s · 1.5 s · Yes.",
    ]
    assert reader.panel.frame["summary"] == "5 rows"


def test_the_batches_of_a_message_are_one_row_that_grows(reader, daemon, log):
    reader.give(daemon.given, log.token("hm", kind="turn.thinking"), *(log.token(f"{n} ") for n in range(300)))
    reader.give(daemon.given, log.message("0 1 2"), log.token("next", message="msg-2"))
    reader.until(lambda panel: len(panel.frame["rows"]) == 4)
    thinking, growing, done, following = reader.panel.frame["rows"]
    assert (growing["kind"], growing["batches"], growing["text"][-7:]) == ("turn.token", 300, "298 299")
    assert (thinking["batches"], done["kind"], following["batches"]) == (1, "message.done", 1)
    record = json.loads(reader.ask("event", row=growing["id"]))
    assert record["data"] == {"message_id": "msg-1", "text": "".join(f"{n} " for n in range(300))}
    assert (record["seq"], record["batches"]) == (301, 300)


def test_an_event_is_copied_unchanged(reader, daemon, log):
    reader.give(daemon.given, log.event("x.odd", {"list": [1, {"\u202eevil": "ü"}]}, turn=None))
    reader.until(lambda panel: panel.frame["rows"])
    text = reader.ask("event", row=0)
    assert "\u202e" not in text
    assert "ü" in text
    assert json.loads(text)["data"] == {"list": [1, {"\u202eevil": "ü"}]}
    for row in (-1, 1, 7, "0"):
        with pytest.raises(Refused):
            reader.ask("event", row=row)


def test_rows_are_filtered_by_group_session_and_text(reader, daemon, log):
    reader.give(daemon.given, log.created(), log.token("It is SUNNY"), log.token("rain", message="m", session="ses-2"))
    reader.give(daemon.given, LOST, LIVE)
    marks = ["connection.lost", "connection.again"]
    reader.until(lambda panel: len(panel.frame["rows"]) == 5)
    reader.ask("filter", text="sunny")
    reader.until(lambda panel: kinds(panel) == ["turn.token", *marks])
    assert reader.panel.frame["summary"] == "3 of 5 rows"
    reader.ask("filter", text="", session="ses-2")
    reader.until(lambda panel: texts(panel)[0] == "rain" and len(panel.frame["rows"]) == 3)
    reader.ask("filter", session="", groups=["sessions"])
    reader.until(lambda panel: kinds(panel) == ["session.created", *marks])
    assert reader.panel.filter == {"groups": ["sessions"], "session": "", "text": ""}


@pytest.mark.parametrize("fields", [{"groups": ["no"]}, {"groups": "text"}, {"session": 1}, {"text": "x" * 201}])
def test_an_invalid_filter_is_refused(reader, fields):
    with pytest.raises(Refused, match="invalid-request"):
        reader.ask("filter", **fields)


def test_a_frame_has_the_newest_rows_and_a_view_can_request_others(reader, daemon, log):
    reader.give(daemon.given, *(log.event("x.n", n) for n in range(250)))
    reader.until(lambda panel: panel.frame["total"] == 250)
    frame = reader.panel.frame
    assert (len(frame["rows"]), frame["base"], frame["first"]) == (WINDOW_ROWS, 0, 150)
    part = reader.ask("rows", first=40, count=5)
    assert [row["text"] for row in part["rows"]] == ["40", "41", "42", "43", "44"]
    assert (part["first"], part["numbering"]) == (40, frame["numbering"])
    assert reader.ask("rows", first=900)["rows"] == []
    with pytest.raises(Refused, match="count"):
        reader.ask("rows", first=0, count=WINDOW_ROWS + 1)


@pytest.mark.slow
def test_the_oldest_rows_are_removed_and_the_others_keep_their_numbers(reader, daemon, log):
    reader.give(daemon.given, *(log.event("x.n", n) for n in range(MAX_ROWS + 30)))
    reader.until(lambda panel: panel.frame["base"] == 30 and panel.frame["total"] == MAX_ROWS)
    assert reader.panel.frame["summary"] == "5,000 rows; older rows were removed: 30"
    assert [row["text"] for row in reader.ask("rows", first=40, count=2)["rows"]] == ["40", "41"]
    part = reader.ask("rows", first=3, count=1)
    assert (part["first"], part["rows"][0]["text"]) == (30, "30")
    with pytest.raises(Refused, match="was removed"):
        reader.ask("event", row=29)


def test_passing_rows_keep_their_numbers_when_older_ones_are_removed(log):
    rows = EventRows()
    rows.filter = RowFilter(text="keep")
    for number in range(MAX_ROWS + 100):
        rows.add(log.event("x.n", f"keep {number}" if number % 2 else "not this"))
    assert rows.base == 50
    assert rows.window(rows.base + 7, 1)["rows"][0]["text"] == f'"keep {100 + 2 * 7 + 1}"'


def test_removed_rows_do_not_grow(log):
    rows = EventRows()
    for number in range(MAX_ROWS + 100):
        rows.add(log.token("x", message=f"m-{number}"))
    assert len(rows) == MAX_ROWS
    rows.add(log.token("y", message="m-0"))
    assert (len(rows), rows.passing[-1].batches) == (MAX_ROWS, 1)


@pytest.mark.parametrize("grows", [False, True])
def test_rows_are_bounded_in_bytes(log, grows):
    rows = EventRows(max_bytes=3_000_000)
    for number in range(300):
        text = "x" * 50_000
        rows.add(log.token(text, message=f"m-{number // 30}") if grows else log.message(text, message=f"m-{number}"))
        assert rows.bytes <= 3_000_000 + 110_000
    assert rows.removed == (0 if grows else rows.count - len(rows))
    assert rows.bytes == pytest.approx(sum(row.size for row in rows.passing))
    assert len(rows) == (10 if grows else pytest.approx(58, abs=3))


def test_a_huge_event_is_cut_and_marked(log):
    rows = EventRows()
    rows.add(log.event("x.huge", "y" * 3_000_000, turn=None))
    record = rows.passing[0].record()
    assert (record["seq"], record["session_id"], record["data"]["cut_at"]) == (1, "ses-1", 1_000_000)
    assert rows.bytes < 1_100_000


def test_an_outage_is_two_rows_whatever_the_number_of_attempts(reader, daemon, log):
    further = [ConnectionState(state="waiting", attempts=n, retry_in_s=9.6, error=LOST.error) for n in range(2, 30)]
    reader.give(
        daemon.given, LOST, *(state for each in further for state in (ConnectionState(state="connecting"), each))
    )
    reader.until(lambda panel: panel.connection["text"] == "no connection; next attempt within 10 s")
    assert reader.panel.connection["error"] == "no answer"
    assert texts(reader.panel) == ["no connection to the daemon (29 attempts have failed): no answer"]
    reader.give(daemon.given, ConnectionState(state="catching-up"), log.created(), LIVE)
    reader.until(lambda panel: panel.connection["state"] == "live")
    assert kinds(reader.panel) == ["connection.lost", "session.created", "connection.again"]
    assert reader.panel.frame["rows"][-1]["mark"]
    assert reader.panel.connection["error"] == ""


def test_missing_events_are_a_row_and_the_sessions_come_from_their_snapshots(reader, daemon, log):
    reader.give(daemon.given, log.token("old"), log.permission_request("per-old"))
    reader.until(lambda panel: [call["id"] for call in panel.permissions] == ["per-old"])
    reader.ask("filter", session="ses-1")
    reader.give(
        daemon.given,
        log.reset(900),
        log.snapshot(902, partial="It is ", waiting=[permission_record("per-1", "shell", {})]),
    )
    # Two events that the snapshot includes, and one after it.
    reader.give(
        daemon.given, log.token("It ", message="m"), log.token("is ", message="m"), log.token("late", message="m")
    )
    reader.until(lambda panel: panel.live.get("text") == "It is late")
    assert [call["id"] for call in reader.panel.permissions] == ["per-1"]
    gap = next(row for row in reader.panel.frame["rows"] if row["kind"] == "stream.reset")
    assert "no longer keeps" in gap["text"]
    assert (gap["mark"], gap["tone"]) == (True, "bad")
    # A text after the gap is a row of its own, also of the same message.
    reader.ask("filter", session="")
    reader.give(daemon.given, log.token("old?"))
    reader.until(lambda panel: texts(panel)[0] == "old" and texts(panel)[-1] == "old?")


def test_the_running_text_of_a_session_is_replaced_by_the_whole_message(reader, daemon, log):
    reader.ask("filter", session="ses-1")
    reader.give(daemon.given, log.created(), log.event("turn.started", {"model": "tiny"}))
    reader.give(daemon.given, log.token("hm", kind="turn.thinking"), log.token("It "), log.token("is"))
    reader.give(daemon.given, log.token("other", message="m-2", session="ses-2"))
    # The last event may be in the next message of state.
    reader.until(lambda panel: panel.live.get("text") == "It is" and len(panel.sessions) == 2)
    assert (reader.panel.live["status"], reader.panel.live["thoughts"]) == ("running", "hm")
    assert {each["name"]: each["status"] for each in reader.panel.sessions} == {
        "ses-2": "running",
        "Weather": "running",
    }
    tool = {"call_id": "c", "name": "weather", "arguments": {}}
    reader.give(daemon.given, log.message("It is so."), log.event("tool.start", tool))
    reader.until(lambda panel: panel.live["activity"] == "running weather")
    assert reader.panel.live["text"] == "It is so."
    reader.give(daemon.given, log.token("Sunny.", message="msg-3"), log.done("Sunny."))
    reader.until(lambda panel: panel.live["status"] == "idle")
    assert reader.panel.live["text"] == "It is so.\n\nSunny."
    assert reader.panel.live["activity"] == "end · 3 tokens · 20.0 tok/s"


def test_ended_tools_failed_turns_and_deleted_sessions_are_shown(log):
    sessions = SessionTracker()
    sessions.add(log.created())
    end = {"call_id": "c", "name": "weather", "status": "error", "text": "", "truncated": False, "elapsed_s": 0.2}
    sessions.add(log.event("tool.end", end))
    assert sessions.live("ses-1")["activity"] == "weather: error"
    sessions.add(log.permission_request())
    error = {"code": "lmx-timeout", "message": "no answer", "type": "x"}
    sessions.add(log.event("turn.error", {"error": error, "text": "", "stats": None}))
    assert (sessions.live("ses-1")["status"], sessions.live("ses-1")["activity"]) == ("idle", "no answer")
    assert sessions.permissions() == []
    sessions.add(log.event("tool.output", {"call_id": "c", "text": "late"}, session="ses-9"))
    sessions.add(log.event("turn.new_kind", {}, session="ses-9"))
    sessions.add(log.permission_request("per-2"))
    sessions.add(log.event("session.deleted", {"session_id": "ses-1"}, turn=None))
    assert (sessions.view(), sessions.permissions()) == ([], [])


def test_decisions_and_stops_are_sent_to_the_daemon_and_calls_are_removed(reader, daemon, log):
    reader.give(
        daemon.given,
        log.created(),
        log.permission_request(arguments={"command": "\u202erm -r"}),
        log.permission_request("per-2"),
    )
    reader.until(lambda panel: len(panel.permissions) == 2)
    call = reader.panel.permissions[0]
    assert (call["tool"], call["session"], call["omitted"]) == ("shell", "Weather", 0)
    assert '"\\u202erm -r"' in call["arguments"]
    reader.ask("decide", permission="per-1", decision="allow", scope="session")
    assert daemon.calls == [("decide", "per-1", "allow", "session")]
    reader.until(lambda panel: [call["id"] for call in panel.permissions] == ["per-2"])
    reader.give(daemon.given, log.resolved("per-2", "deny"))
    reader.until(lambda panel: not panel.permissions)
    reader.ask("cancel", session="ses-1")
    assert daemon.calls[1:] == [("cancel", "ses-1")]
    # The end of a turn removes its waiting calls.
    reader.give(daemon.given, log.permission_request("per-3"))
    reader.until(lambda panel: panel.permissions)
    reader.give(daemon.given, log.done(""))
    reader.until(lambda panel: not panel.permissions)


def test_a_refused_decision_is_reported_and_the_call_stays(reader, daemon, log):
    reader.give(daemon.given, log.permission_request())
    reader.until(lambda panel: panel.permissions)
    daemon.refusal = PermissionNotFoundError("per-1 was decided by another client")
    with pytest.raises(Refused, match="another client"):
        reader.ask("decide", permission="per-1", decision="deny")
    for wrong in ({"decision": "maybe"}, {"decision": "allow", "scope": "always"}, {"decision": True}):
        with pytest.raises(Refused, match="invalid-request"):
            reader.ask("decide", permission="per-1", **wrong)
    assert reader.panel.permissions
    assert not daemon.calls


def test_a_view_has_the_oldest_waiting_calls_and_long_arguments_are_cut(log):
    sessions = SessionTracker()
    for number in range(105):
        sessions.add(log.permission_request(f"per-{number}", arguments={"text": "x" * 30_000}))
    for shown in (5, 6):
        calls = sessions.permissions()
        assert (calls[0]["id"], len(calls)) == (f"per-{shown}", 20)
        assert len(calls[0]["arguments"]) == 20_000
        assert calls[0]["omitted"] > 10_000
        sessions.remove_permission(calls[0]["id"])


def test_sessions_and_their_texts_are_bounded(log):
    sessions = SessionTracker()
    for number in range(300):
        sessions.add(log.created(f"ses-{number}", f"Title {number}"))
        sessions.add(log.token("x" * 50_000, session=f"ses-{number}"))
    seen = sessions.view()
    assert [each["name"] for each in seen[:2]] == ["Title 299", "Title 298"]
    assert len(seen) == 200
    assert len(sessions.live("ses-299")["text"]) == MAX_TURN_CHARACTERS
    assert sessions.live("ses-1") == {}
    for number in range(100):
        sessions.add(log.message("y" * 1000, message=f"m-{number}"))
    assert len(sessions.live("ses-1")["text"]) == MAX_TURN_CHARACTERS


def test_a_failed_connection_is_shown_and_can_be_retried(reader, daemon):
    reader.give(daemon.given, UnauthorizedError("the token has changed; launch again"))
    reader.until(lambda panel: panel.connection["state"] == "closed")
    assert reader.panel.connection["error"] == "the token has changed; launch again"
    assert kinds(reader.panel) == ["connection.closed"]
    reader.ask("reconnect")
    reader.until(lambda panel: panel.connection["state"] == "connecting")
    reader.give(daemon.given, LIVE)
    reader.until(lambda panel: panel.connection["state"] == "live")
    assert daemon.readers == 2


@pytest.mark.slow
def test_without_a_daemon_the_panel_says_how_to_start_one(workbench):
    reader = Reader(EventsPanel(workbench))
    reader.until(lambda panel: panel.connection["state"] == "none")
    assert "launch(daemon=True)" in reader.panel.connection["text"]
    assert "launch(daemon=True)" in reader.panel.snapshot_html()
    with pytest.raises(Refused, match="daemon=True"):
        reader.ask("cancel", session="ses-1")
    daemon = ScriptedDaemon()
    workbench.follow_events(daemon)
    reader.give(daemon.given, LIVE)
    reader.until(lambda panel: panel.connection["state"] == "live")
    workbench.follow_events(None)
    reader.until(lambda panel: panel.connection["state"] == "none")


def test_events_of_another_daemon_follow_a_mark(reader, workbench, daemon, log):
    reader.give(daemon.given, log.created(), log.permission_request())
    reader.until(lambda panel: panel.permissions)
    following = ScriptedDaemon()
    workbench.follow_events(following)
    reader.give(following.given, LIVE, ScriptedLog("log-2").created())
    reader.until(lambda panel: kinds(panel)[-2:] == ["connection.other", "session.created"])
    assert reader.panel.permissions == []


def test_a_resumed_workbench_shows_no_event_twice(reader, workbench, backend, daemon, log):
    first, second = log.created(), log.done("")
    reader.give(daemon.given, first)
    reader.until(lambda panel: kinds(panel) == ["session.created"])
    workbench.suspend()
    assert reader.panel.connection["state"] == "closed"
    daemon.given = type(daemon.given)()
    workbench.follow(backend)
    reader.give(daemon.given, LIVE, first, second)
    reader.until(lambda panel: panel.connection["state"] == "live" and kinds(panel)[-1] == "turn.done")
    assert kinds(reader.panel) == ["session.created", "turn.done"]
    assert daemon.readers == 2


def test_a_closed_panel_stops_reading(reader, workbench, backend, daemon):
    task = reader.panel.task
    reader.panel.close()
    reader.until(lambda _panel: task.cancelled())
    workbench.follow(backend)
    reader.give(daemon.given)
    assert daemon.readers == 1


def test_clear_removes_rows_and_keeps_waiting_calls(reader, daemon, log):
    reader.give(daemon.given, log.created(), log.permission_request())
    reader.until(lambda panel: panel.frame["total"] == 2)
    reader.ask("clear")
    reader.until(lambda panel: panel.frame["total"] == 0)
    assert len(reader.panel.permissions) == 1
    reader.give(daemon.given, log.token("x"))
    reader.until(lambda panel: kinds(panel) == ["turn.token"])


@pytest.mark.slow
def test_many_events_make_few_frames_and_bounded_rows(backend):
    begun, daemon, workbench = time.monotonic(), Flood(10_000), Workbench(backend)
    workbench.follow_events(daemon)
    reader = Reader(EventsPanel(workbench))
    reader.until(lambda panel: panel.frame["base"] > 1000)
    frames = [value for name, value in reader.frames if name == "frame"]
    # Of 6,000 rows, which are 27,000 events, the 1,000 oldest were removed.
    assert daemon.sent > 25_000
    assert len(frames) <= 4 * (time.monotonic() - begun) + 2
    assert all(len(frame["rows"]) <= WINDOW_ROWS for frame in frames)
    assert reader.ask("rows", first=10**9)["rows"] == []
    assert reader.panel.frame["total"] <= MAX_ROWS
    workbench.suspend()


def test_the_data_frame_has_all_rows_and_their_times(reader, daemon, log):
    empty = reader.panel.df
    assert list(empty.columns) == list(COLUMNS)
    assert len(empty) == 0
    reader.give(daemon.given, log.created(), log.token("It "), log.token("is"), LOST)
    reader.ask("filter", text="no row has this")
    reader.until(lambda panel: panel.frame["total"] == 1)
    frame = reader.panel.df
    assert frame["event"].tolist() == ["session.created", "turn.token", "connection.lost"]
    assert (frame["text"][1], frame["batches"][1], frame["seq"][1]) == ("It is", 2, 3)
    assert str(frame["time"][0]) == "2026-11-22 10:00:00.123000+00:00"
    assert frame["seq"].isna().tolist() == [False, False, True]
    assert frame.dtypes.to_dict() == empty.dtypes.to_dict()
    assert [str(frame[name].dtype) for name in ("time", "seq")] == ["datetime64[us, UTC]", "Int64"]
    assert json.loads(frame["json"][0])["data"]["session"]["title"] == "Weather"


def test_the_snapshot_has_the_newest_rows_as_text(reader, daemon, log):
    reader.give(daemon.given, *(log.event("x.n", n) for n in range(60)), log.message("<script>alert(1)</script>"))
    reader.until(lambda panel: panel.frame["total"] == 61)
    text = reader.panel.snapshot_html()
    assert "live, http://127.0.0.1:8401; 61 rows, the last 40 below" in text
    assert "&lt;script&gt;" in text
    assert "<script" not in text
    assert text.count("<tr>") == 41


def test_without_names_the_panel_is_shown_only_with_a_daemon(workbench):
    alone = compose_panels(workbench, ())
    assert not any(isinstance(panel, EventsPanel) for panel in alone.children)
    workbench.follow_events(ScriptedDaemon())
    both = compose_panels(workbench, ())
    assert isinstance(both.children[-1], EventsPanel)
    assert compose_panels(workbench, ("events",)) is both.children[-1]
