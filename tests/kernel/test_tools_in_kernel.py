"""Test Python functions of a notebook as tools."""


def test_the_output_of_a_tool_appears_below_the_cell_that_registered_it(fresh_notebook):
    fresh_notebook.run(
        """
        from lmx_lab.daemon.tools.python_tools import PythonTools
        from lmx_lab.portal import LoopThread

        tools, loop = PythonTools(), LoopThread()
        loop.start()

        def talk(number: int) -> int:
            print("printed", number)
            return number

        tools.register(talk)
        """
    )
    fresh_notebook.run("tools.register(talk)")
    printed = fresh_notebook.run("print(loop.run(tools.call('talk', {'number': '3'})))")
    assert "ToolResult(status='ok', text='3')" in printed
    assert "printed 3" in printed
