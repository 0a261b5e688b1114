"""Test the metrics panel: its charts, pause and the length of its time axis."""

from playwright.sync_api import expect

from tests.browser.jupyterlab import LONG_ANSWER, ask, chart_moves, drawn


def test_the_chart_moves_while_an_answer_streams(panels):
    metrics = panels.panel("Metrics")
    ask(panels, "Tell me a story.", max_tokens=LONG_ANSWER)
    decode = metrics.locator("figcaption").first.locator("b").first
    panels.wait(lambda: float(decode.inner_text().split()[0]) > 0, "decoding shows")
    chart_moves(panels)
    chart_moves(panels)
    panels.page.keyboard.press("Escape")
    panels.wait(lambda: float(decode.inner_text().split()[0]) == 0, "it is over")


def test_a_paused_chart_does_not_change_until_it_is_resumed(panels):
    metrics = panels.panel("Metrics")
    chart_moves(panels)
    metrics.get_by_role("button", name="Pause").click()
    resume = metrics.get_by_role("button", name="Resume")
    expect(resume).to_be_visible()
    still, taken = drawn(panels), int(panels.kernel("print(len(lab.metrics().samples))"))
    panels.wait(lambda: int(panels.kernel("print(len(lab.metrics().samples))")) > taken + 2, "samples are taken")
    assert drawn(panels) == still
    resume.focus()
    panels.page.keyboard.press("Enter")
    panels.wait(lambda: drawn(panels) != still, "the chart moves again")


def test_the_window_is_chosen_by_keyboard(panels):
    window = panels.panel("Metrics").get_by_label("window")
    window.focus()
    panels.page.keyboard.press("End")
    panels.wait(lambda: panels.kernel("print(lab.metrics().minutes)") == "15", "the panel knows")
    # JupyterLab would select the previous cell.
    panels.page.keyboard.press("ArrowUp")
    panels.wait(lambda: panels.kernel("print(lab.metrics().minutes)") == "5", "the panel knows")
    expect(window).to_be_focused()


def test_keys_on_a_button_are_not_commands_of_the_notebook(panels):
    cells = panels.page.locator(".jp-Notebook:visible .jp-Cell")
    before = cells.count()
    panels.panel("Metrics").get_by_role("button", name="Pause").focus()
    panels.page.keyboard.type("ddab")
    panels.page.keyboard.press("Space")
    expect(panels.panel("Metrics").get_by_role("button", name="Resume")).to_be_focused()
    panels.page.keyboard.press("Enter")
    expect(panels.panel("Metrics").get_by_role("button", name="Pause")).to_be_visible()
    assert cells.count() == before


def test_the_values_of_a_chart_are_also_a_table_and_a_data_frame(panels):
    table = panels.panel("Metrics").locator("table").first
    panels.wait(lambda: table.locator("tbody tr").count() > 1, "rows are written")
    assert "decode_tokens_per_second" in panels.kernel("print(list(lab.metrics().df))")
