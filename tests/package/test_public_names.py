"""Public names and their signatures change only on purpose: ``public_names.txt`` lists them."""

import inspect
from pathlib import Path

import lmx_lab
import lmx_lab.client

FILE = Path(__file__).parent / "public_names.txt"


def test_public_names_and_signatures_are_those_of_the_list():
    """After a change on purpose: ``python -m tests.package.test_public_names``. What ``docs/scope.md`` calls stable
    changes only after a deprecation, whose message names the version that removes the old form.
    """
    assert described() == FILE.read_text(encoding="utf-8").splitlines()


def described() -> list[str]:
    """Return a line for each public name of both packages, and for each public method and property of a class."""
    lines = []
    for package in (lmx_lab, lmx_lab.client):
        for name in sorted(package.__all__):
            found = getattr(package, name)
            lines.append(line(f"{package.__name__}.{name}", found))
            if inspect.isclass(found):
                members = sorted(it for kind in found.__mro__ if of_package(kind) for it in vars(kind))
                lines += [
                    line(f"{package.__name__}.{name}.{member}", inspect.getattr_static(found, member))
                    for member in dict.fromkeys(members)
                    if not member.startswith("_")
                ]
    return lines


def of_package(kind):
    return kind.__module__.partition(".")[0] == "lmx_lab"


def line(name, found):
    function = getattr(found, "__func__", found)
    if isinstance(found, property) or not callable(function):
        return name
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return name
    # Without types, whose text depends on the version of Python. A default that is an object is an ellipsis.
    shown = [
        it.replace(
            annotation=inspect.Parameter.empty,
            default=it.default
            if it.default is inspect.Parameter.empty or isinstance(it.default, str | int | float | tuple | None)
            else ...,
        )
        for it in parameters
    ]
    return f"{name}{inspect.Signature(shown)}"


if __name__ == "__main__":
    FILE.write_text("\n".join(described()) + "\n", encoding="utf-8")
