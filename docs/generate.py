"""The pages that are made from the code, for mkdocs-gen-files: the command line, and the protocol's messages.

`mkdocs build` runs this file. The command line comes out of the argparse parsers, the messages out of the .proto files
and their comments. Nothing is written into docs/.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import mkdocs_gen_files
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
    SourceCodeInfo,
)

import dynatree.client
from dynatree.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
PROTO_FILES = ("draft", "verify", "tree")  # in the page's order: what clients call comes first

USAGE_WIDTH = 76  # characters of its arguments
MOST_CHOICES_INLINE = 4

COMMAND_LINE = """\
# Command line

This page lists all subcommands and options of `dynatree`. `--help` after a subcommand prints the same, and
`dynatree --version` prints the version. Option names cannot be abbreviated.

| exit status | meaning |
| --- | --- |
| 0 | success |
| 1 | a failure, described in one line on standard error |
| 2 | a wrong command line |
| 70 | a service whose device, offloaded layer or parallel process has failed; a supervisor should restart it |
| 130 | an interrupt (Ctrl-C); a service that is ready stops with 0 |
| 141 | the reader of the output has closed it, for example `head` |
| 143 | SIGTERM, before a service is ready |
"""


def main() -> None:
    """Write the generated pages."""
    write("reference/command-line.md", "w", command_line())
    write("reference/protocol.md", "a", protocol())  # the page begins with a part written by hand
    check_python_page((ROOT / "docs/reference/python.md").read_text(encoding="utf-8"))


def write(page: str, mode: str, blocks: Iterable[str]) -> None:
    """Write Markdown blocks, with an empty line around each; empty ones are left out."""
    with mkdocs_gen_files.open(page, mode, encoding="utf-8") as file:
        file.writelines(f"\n{block.strip()}\n" for block in blocks if block)


# The command line


def command_line() -> Iterator[str]:
    """The blocks of the page of all subcommands."""
    os.environ["NO_COLOR"] = "1"  # argparse of Python 3.14 colours the usage where it finds a terminal
    yield COMMAND_LINE
    yield table(
        ("subcommand", "purpose"),
        ((f"[`dynatree {name}`](#{name})", help_line) for name, (help_line, _) in COMMANDS.items()),
    )
    for name, (help_line, module) in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=f"dynatree {name}", description=help_line)
        importlib.import_module(module).add_arguments(parser)
        yield from command(parser, level=2)


def command(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    """The blocks of one command and of its own subcommands."""
    slug = parser.prog.removeprefix("dynatree ").replace(" ", "-")
    yield f"{'#' * level} {parser.prog} {{#{slug}}}"
    yield capitalised(marked(parser.description or "")) + "."
    yield f"```text\n{usage(parser)}\n```"
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        if group.title not in ("positional arguments", "options"):
            description = f": {marked(group.description)}" if group.description else ""
            yield f"**{group.title}**{description}"
        for action in shown:
            if isinstance(action, argparse._SubParsersAction):
                yield from commands_below(action, slug, level + 1)
            elif not isinstance(action, argparse._HelpAction):
                yield option(action, slug)


def usage(parser: argparse.ArgumentParser) -> str:
    """A command's usage; where its arguments take several lines, the command has one of its own."""
    head = f"usage: {parser.prog} "
    parser.formatter_class = partial(argparse.HelpFormatter, width=len(head) + USAGE_WIDTH)
    lines = [line.strip() for line in parser.format_usage().removeprefix(head).splitlines()]
    return f"{parser.prog} {lines[0]}" if len(lines) == 1 else "\n    ".join([parser.prog, *lines])


def commands_below(action: argparse._SubParsersAction[argparse.ArgumentParser], slug: str, level: int) -> Iterator[str]:
    """The blocks of a command's own subcommands, after a list of them."""
    rows = ((f"[`{each.dest}`](#{slug}-{each.dest})", marked(each.help or "")) for each in action._choices_actions)
    yield table((str(action.metavar).lower(), "purpose"), rows)
    for parser in action.choices.values():
        yield from command(parser, level)


def option(action: argparse.Action, slug: str) -> str:
    """One argument of a command, as an entry of a definition list that others can link to."""
    value = metavar(action)
    names = [f"{name} {value}".rstrip() for name in action.option_strings] or [value]
    anchor = max(action.option_strings, key=len, default=action.dest).lstrip("-")
    required = " (required)" if action.option_strings and action.required else ""
    return f"`{', '.join(names)}`{{#{slug}-{anchor}}}{required}\n:   {meaning(action) or '&nbsp;'}"


def metavar(action: argparse.Action) -> str:
    """What stands for an argument's value, as `--help` has it; empty for a switch."""
    if action.nargs == 0:
        return ""
    if action.metavar is None and action.choices and len(list(action.choices)) <= MOST_CHOICES_INLINE:
        return "{" + ",".join(map(str, action.choices)) + "}"
    name = str(action.metavar or (action.dest.upper() if action.option_strings else action.dest))
    return f"{name} [{name} ...]" if action.nargs == "+" else name


def meaning(action: argparse.Action) -> str:
    """An argument's help, with its default and its choices where the help does not name them."""
    text = (action.help or "") % {**vars(action), "prog": ""}
    if action.choices and len(list(action.choices)) > MOST_CHOICES_INLINE:
        text += "; one of " + ", ".join(f"`{choice}`" for choice in action.choices)
    if "default" not in text and action.default not in (None, False, [], {}, argparse.SUPPRESS):
        text += f" (default: {action.default})"
    return marked(text.strip())


# The protocol


def protocol() -> Iterator[str]:
    """The blocks that list services, methods, messages and fields."""
    files = descriptors()
    packages = {f".{file.package}." for file in files}
    for file in files:
        yield from ProtoFile(file, packages).blocks()


def descriptors() -> list[FileDescriptorProto]:
    """The compiled .proto files, with their comments."""
    names = [f"dynatree/v1/{name}.proto" for name in PROTO_FILES]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "descriptors.pb")
        flags = [f"--proto_path={ROOT / 'protos'}", "--include_source_info", f"--descriptor_set_out={out}"]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *flags, *names], check=True)
        compiled = {file.name: file for file in FileDescriptorSet.FromString(out.read_bytes()).file}
    return [compiled[name] for name in names]


class ProtoFile:
    """One .proto file as Markdown. A comment belongs to the declaration below it, as protoc has it."""

    def __init__(self, file: FileDescriptorProto, packages: set[str]) -> None:
        self._file = file
        self._packages = packages
        self._comments = {tuple(each.path): comment(each) for each in file.source_code_info.location}

    def blocks(self) -> Iterator[str]:
        """The file's services, messages and enumerations, in its own order."""
        name = self._file.name.rpartition("/")[2]
        yield f"## {name} {{#{name.replace('.', '-')}}}"
        for index, service in enumerate(self._file.service):
            yield from self._service(service, (FileDescriptorProto.SERVICE_FIELD_NUMBER, index))
        for index, message in enumerate(self._file.message_type):
            yield from self._message(message, (FileDescriptorProto.MESSAGE_TYPE_FIELD_NUMBER, index))
        for index, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (FileDescriptorProto.ENUM_TYPE_FIELD_NUMBER, index))

    def _service(self, service: ServiceDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield self._heading(f"service {service.name}", service.name)
        yield self._comment(path)
        methods = enumerate(service.method)
        yield table(
            ("method", "request", "response", "meaning"),
            (
                (
                    f"`{method.name}`",
                    self._streamed(method.input_type, method.client_streaming),
                    self._streamed(method.output_type, method.server_streaming),
                    self._comment((*path, ServiceDescriptorProto.METHOD_FIELD_NUMBER, index)),
                )
                for index, method in methods
            ),
        )

    def _message(self, message: DescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield self._heading(message.name, message.name)
        yield self._comment(path)
        if not message.field:
            yield "This message has no fields."
            return
        yield table(
            ("field", "type", "meaning"),
            (
                (
                    f"`{field.name} = {field.number}`",
                    self._field_type(field, message),
                    self._comment((*path, DescriptorProto.FIELD_FIELD_NUMBER, index)),
                )
                for index, field in enumerate(message.field)
            ),
        )

    def _enum(self, enum: EnumDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield self._heading(f"enum {enum.name}", enum.name)
        yield self._comment(path)
        yield table(
            ("value", "meaning"),
            (
                (
                    f"`{value.name} = {value.number}`",
                    self._comment((*path, EnumDescriptorProto.VALUE_FIELD_NUMBER, index)),
                )
                for index, value in enumerate(enum.value)
            ),
        )

    def _heading(self, title: str, anchor: str) -> str:
        return f"### {title} {{#{anchor}}}"

    def _comment(self, path: tuple[int, ...]) -> str:
        return self._comments.get(path, "")

    def _streamed(self, type_name: str, streamed: bool) -> str:
        return ("stream of " if streamed else "") + self._link(type_name)

    def _field_type(self, field: FieldDescriptorProto, message: DescriptorProto) -> str:
        entry = next((each for each in message.nested_type if field.type_name.endswith(f".{each.name}")), None)
        if entry is not None and entry.options.map_entry:
            key, value = (self._type(each) for each in entry.field)
            return f"map from {key} to {value}"
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {self._type(field)}"
        if field.proto3_optional:
            return f"optional {self._type(field)}"
        if field.HasField("oneof_index"):
            return f"{self._type(field)}, one of `{message.oneof_decl[field.oneof_index].name}`"
        return self._type(field)

    def _type(self, field: FieldDescriptorProto) -> str:
        if field.type_name:
            return self._link(field.type_name)
        return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()

    def _link(self, type_name: str) -> str:
        package, _, name = type_name.rpartition(".")
        assert f"{package}." in self._packages, f"{type_name} is of none of the files on this page"
        return f"[{name}](#{name})"


def comment(location: SourceCodeInfo.Location) -> str:
    """The comment above a declaration, in one line of Markdown."""
    return marked(" ".join(location.leading_comments.split()))


# The Python client


def check_python_page(markdown: str) -> None:
    """Fail unless the page documents exactly what the client library exports.

    Raises:
        SystemExit: With the names that one has and the other lacks.
    """
    documented = set(re.findall(r"^::: dynatree\.client\.(\w+)$", markdown, re.MULTILINE))
    different = sorted(documented ^ set(dynatree.client.__all__))
    if different:
        raise SystemExit(f"docs/reference/python.md and dynatree.client.__all__ differ in {', '.join(different)}")


# Markdown


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; bars within its cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def marked(text: str) -> str:
    """Plain text as Markdown: identifiers, options and JSON as code, as what is quoted already."""
    code = re.compile(r"`[^`]*`|(?<!\w)--[a-z][a-z-]*|\b[A-Za-z][\w.]*_[\w.]*\w\b|\{\"[^}]*\}")
    return code.sub(lambda match: f"`{match[0].strip('`')}`", text.replace("<", "&lt;"))


def capitalised(text: str) -> str:
    """The text as the beginning of a sentence."""
    return text[:1].upper() + text[1:]


main()
