"""`powerinfer completion SHELL`: a script that completes commands and options, made of the parsers."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from .options import Parser

EXAMPLES = """
source <(powerinfer completion bash)      in ~/.bashrc
source <(powerinfer completion zsh)       in ~/.zshrc
powerinfer completion fish > ~/.config/fish/completions/powerinfer.fish
"""

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: Parser) -> None:
    parser.open_with(EXAMPLES, usage="SHELL")
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


@dataclass
class Option:
    flags: list[str]
    help: str
    takes_value: bool
    values: list[str] = field(default_factory=list)
    """Empty: any text, or a file."""


@dataclass
class Command:
    """A command, or an action of one ("predictor check")."""

    name: str
    help: str
    options: list[Option]
    words: list[str]
    """What may stand in place of its first argument; empty: a file."""


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    if not action.help or action.help is argparse.SUPPRESS:
        return ""
    return action.help % {**vars(action), "prog": parser.prog} if "%" in action.help else action.help


def _command(name: str, text: str, parser: argparse.ArgumentParser) -> Iterator[Command]:
    options, words, actions = [], [], []
    for action in parser._actions:
        choices = [str(choice) for choice in action.choices or ()]
        if isinstance(action, argparse._SubParsersAction):
            words = choices
            shown = {choice.dest: choice.help or "" for choice in action._choices_actions}
            actions = [
                (f"{name} {word}", shown.get(word, ""), child) for word, child in action.choices.items()
            ]
        elif action.option_strings:
            takes = action.nargs != 0
            options.append(Option(list(action.option_strings), _help(action, parser), takes, choices))
        elif choices and not words:
            words = choices
        elif action.dest == "model":
            words = ["demo"]
    yield Command(name, text, options, words)
    for full, shown_text, child in actions:
        yield from _command(full, shown_text, child)


def commands() -> list[Command]:
    """All of them, in the order of the help."""
    from . import COMMANDS, build_parser

    found: list[Command] = []
    for name, text in COMMANDS.items():
        parser = build_parser([name])
        chosen = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices[name]
        found += _command(name, text, chosen)
    return found


_BASH = """\
# Completion of powerinfer for {shell}.
_powerinfer() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}}
    local command= word words= options= values=
    local -i i n=0
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${{COMP_WORDS[i]}}
        case $word in -*) continue ;; esac
        case "$command $word" in
{nested}
            *) if [[ -z $command ]]; then command=$word; else n+=1; fi ;;
        esac
    done
    case $command in
{table}
    esac
    case "$command,$prev" in
{values}
    esac
    if [[ -n $values ]]; then
        if [[ $values != '*' ]]; then COMPREPLY=($(compgen -W "$values" -- "$cur")); return; fi
    elif [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$cur")); return
    elif ((n == 0)); then
        COMPREPLY=($(compgen -W "$words" -- "$cur"))
        case $words in ''|demo) ;; *) return ;; esac
    fi
    compopt -o filenames 2>/dev/null
    local IFS=$'\\n'
    COMPREPLY+=($(compgen -f -- "$cur"))
}}
complete -F _powerinfer powerinfer
"""


def bash(shell: str = "bash") -> str:
    """The script for bash; zsh reads it too, through its bashcompinit."""
    found = commands()
    top = Command("", "", [Option(["-h", "--help"], "", False), Option(["--version"], "", False)], [])
    top.words = [command.name for command in found if " " not in command.name]
    nested, table, values = [], [], []
    for command in [top, *found]:
        quoted = shlex.quote(command.name) if command.name else "''"
        flags = " ".join(flag for option in command.options for flag in option.flags)
        table.append(f'        {quoted}) words="{" ".join(command.words)}" options="{flags}" ;;')
        if " " in command.name:
            nested.append(f"            {quoted}) command={quoted} ;;")
        for option in command.options:
            if option.takes_value:
                keys = "|".join(shlex.quote(f"{command.name},{flag}") for flag in option.flags)
                values.append(f'        {keys}) values="{" ".join(option.values) or "*"}" ;;')
    script = _BASH.format(
        shell=shell, nested="\n".join(nested), table="\n".join(table), values="\n".join(values)
    )
    return script if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{script}"


def fish() -> str:
    """The script for fish."""
    lines = ["# Completion of powerinfer for fish."]

    def add(condition: str, *words: str) -> None:
        lines.append(" ".join(["complete -c powerinfer", f"-n {_fish(condition)}", *words]))

    found = commands()
    for command in found:
        head, _, action = command.name.partition(" ")
        if action:
            others = " ".join(c.name.split()[1] for c in found if c.name.startswith(head + " "))
            seen = f"__fish_seen_subcommand_from {head}; and not __fish_seen_subcommand_from {others}"
            add(seen, f"-f -a {_fish(action)} -d {_fish(command.help)}")
            condition = f"__fish_seen_subcommand_from {head}; and __fish_seen_subcommand_from {action}"
        else:
            add("__fish_use_subcommand", f"-f -a {_fish(head)} -d {_fish(command.help)}")
            condition = f"__fish_seen_subcommand_from {head}"
            if command.words and not any(c.name.startswith(head + " ") for c in found):
                files = "" if command.words == ["demo"] else "-f "
                add(condition, f"{files}-a {_fish(' '.join(command.words))}")
        for option in command.options:
            flags = [f"-l {flag[2:]}" if flag.startswith("--") else _short(flag) for flag in option.flags]
            taken = ""
            if option.values:
                taken = f"-x -a {_fish(' '.join(option.values))}"
            elif option.takes_value:
                taken = "-r"
            add(condition, *flags, *filter(None, [taken]), f"-d {_fish(option.help)}")
    return "\n".join(lines) + "\n"


def _short(flag: str) -> str:
    return f"-s {flag[1:]}" if len(flag) == 2 else f"-o {flag[1:]}"


def _fish(text: str) -> str:
    """A word in fish's single quotes, in one line."""
    plain = " ".join(text.split())
    return "'" + plain.replace("\\", "\\\\").replace("'", "\\'") + "'"


def main(args: argparse.Namespace) -> int:
    print(fish() if args.shell == "fish" else bash(args.shell), end="")
    return 0
