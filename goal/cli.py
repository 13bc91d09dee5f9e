"""The `goal` command. Thin: every subcommand reads its arguments and calls one function."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from goal.config import RunConfig
from goal.effort import effort
from goal.errors import ConfigurationError, GoalError

DEFAULT_FOLDER = Path("runs")


@dataclass(frozen=True)
class RunCommand:
    """Do the whole job: vocabulary, pretraining, reward, SCPO, calibration, evaluation, report.

    Without arguments it learns in the simulated environment `calibrated`; with --log and --schema, from a table. A run
    that was interrupted goes on where it stopped when it is started again with the same --out.
    """

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    out: Path | None = None
    """Folder of the run; by default runs/NAME, after the environment or the log."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class VocabularyCommand(RunCommand):
    """Start a run: read the log and build its vocabulary of incentive tokens (Algorithm 1).

    With --amounts and --column no run is started: the vocabulary of one column of Parquet files of any size is built a
    row group at a time, and vocabulary.json is written into --out.
    """

    amounts: Path | None = None
    """Parquet file, or folder of them, to build a vocabulary from without starting a run."""
    column: str | None = None
    """Column that holds the amounts."""


@dataclass(frozen=True)
class StageCommand:
    """Run one stage of a run whose earlier stages have ended."""

    out: Path
    """Folder of the run."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class PretrainCommand(StageCommand):
    """Learn to write the logged amounts (weighted next-token prediction)."""


@dataclass(frozen=True)
class RewardCommand(StageCommand):
    """Learn what a payment brings, now (P-Score) and later (long-horizon value)."""


@dataclass(frozen=True)
class ScpoCommand(StageCommand):
    """Optimise the policy for every multiplier of the candidate set."""


@dataclass(frozen=True)
class CalibrateCommand(StageCommand):
    """Find the multiplier that meets the ROI target."""


@dataclass(frozen=True)
class EvaluateCommand(StageCommand):
    """Measure the policy over the range of multipliers."""


@dataclass(frozen=True)
class ReportCommand(StageCommand):
    """Write summary.json, the plots and report.html again."""


@dataclass(frozen=True)
class AllocateCommand:
    """Write what the policy of a run pays at the last event of every user of a log (Parquet).

    That event is the pending one: its features count, what it says of amount and outcomes is not looked at (0 will do).
    """

    out: Path
    """Folder of the run."""
    log: Path
    """Parquet file or folder, or CSV, with each user's events up to the pending one."""
    amounts: Path
    """The Parquet file to write, with the ending .parquet or .pq."""
    schema: Path | None = None
    """TOML file that names the roles of the log's columns; by default that of the run's own log."""
    multiplier: float | None = None
    """Multiplier to pay under; by default the calibrated one."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class SimulateCommand:
    """Write a log of simulated users (Parquet) with the schema that reads it (TOML)."""

    out: Path
    """The Parquet file, with the ending .parquet or .pq; the schema goes beside it with the ending .toml."""
    environment: str = "calibrated"
    """Preset (calibrated, paper, population) or environment file."""
    behaviour: Literal["greedy", "uniform", "fixed_medium", "mixture"] = "mixture"
    """Who pays: most, at random, the middle amount, or one of these drawn for each user."""
    users: int = 10_000
    seed: int = 0
    debug: bool = False
    """Show the traceback of an error."""


COMMANDS: dict[str, type] = {
    "run": RunCommand,
    "simulate": SimulateCommand,
    "vocabulary": VocabularyCommand,
    "pretrain": PretrainCommand,
    "reward": RewardCommand,
    "scpo": ScpoCommand,
    "calibrate": CalibrateCommand,
    "evaluate": EvaluateCommand,
    "report": ReportCommand,
    "allocate": AllocateCommand,
}
STAGE_OF: dict[type, str] = {
    PretrainCommand: "pretraining",
    RewardCommand: "reward",
    ScpoCommand: "scpo",
    CalibrateCommand: "calibration",
    EvaluateCommand: "evaluation",
    ReportCommand: "report",
}
DESCRIPTION = "Learn one policy that allocates incentives under a return-on-investment target."


def _parse(arguments: list[str]) -> Any:
    # What --effort stands for is the default of every other setting, so it is read first.
    level = "default"
    for index, argument in enumerate(arguments):
        if argument == "--effort" and index + 1 < len(arguments):
            level = arguments[index + 1]
        elif argument.startswith("--effort="):
            level = argument.partition("=")[2]
    simulated = not any(argument == "--log" or argument.startswith("--log=") for argument in arguments)
    defaults = effort("thorough" if level == "thorough" else "default", simulated=simulated)
    if not simulated:
        # So that an environment beside a log is one that somebody asked for.
        defaults = dataclasses.replace(defaults, environment=None)
    commands: Any = None
    for name, kind in COMMANDS.items():
        default = kind(config=defaults) if issubclass(kind, RunCommand) else tyro.MISSING_NONPROP
        one = Annotated[kind, tyro.conf.subcommand(name, default=default)]
        commands = one if commands is None else commands | one
    return tyro.cli(
        commands, prog="goal", description=DESCRIPTION, args=arguments, config=(tyro.conf.OmitSubcommandPrefixes,)
    )


def _execute(command: Any) -> None:
    if isinstance(command, SimulateCommand):
        _require_parquet("--out", command.out)
        schema = command.out.with_suffix(".toml")
        if schema.resolve() == Path(command.environment).resolve():
            raise ConfigurationError(
                f"--out {command.out}: its schema {schema} would replace the environment; give the log another name"
            )
        from goal.log import write
        from goal.simulator import load, simulate

        log = simulate(load(command.environment), command.behaviour, users=command.users, seed=command.seed)
        command.out.parent.mkdir(parents=True, exist_ok=True)
        write(log, command.out)
        log.schema.save(schema)
        print(f"{log.events} events of {log.users} users in {command.out}, schema in {schema}")
        return
    if isinstance(command, AllocateCommand):
        _allocate(command)
        return
    if isinstance(command, VocabularyCommand) and (command.amounts is not None or command.column is not None):
        _build_vocabulary(command)
        return
    from goal.pipeline import Run

    show: dict[str, Any] = {"progress": sys.stderr.isatty(), "announce": lambda text: print(text, file=sys.stderr)}
    if isinstance(command, RunCommand):
        config = command.config
        name = Path(config.log).stem if config.log else Path(config.environment or "calibrated").stem
        run = Run(config, command.out or DEFAULT_FOLDER / name, **show)
        if isinstance(command, VocabularyCommand):
            run.run(until="vocabulary")
            print(f"{run.tokenizer.statistics} (in {run.folder})")
        else:
            _print_summary(run.run(), run.folder)
        return
    run = Run.open(command.out, **show)
    # Training goes on or is left alone; what only measures is done again when asked for by name.
    run.run_stage(
        STAGE_OF[type(command)], again=isinstance(command, (CalibrateCommand, EvaluateCommand, ReportCommand))
    )


def _require_parquet(option: str, path: Path) -> None:
    if path.suffix not in (".parquet", ".pq"):
        raise ConfigurationError(
            f"{option} {path}: expected a name that ends in .parquet or .pq, such as {path.with_suffix('.parquet')}"
        )
    if path.is_dir():
        raise ConfigurationError(f"{option} {path}: is a folder; expected the name of a file")


def _goes_on(command: Any) -> bool:
    """Whether a command that was interrupted leaves something that it goes on from."""
    if isinstance(command, VocabularyCommand):
        return command.amounts is None
    return isinstance(command, (RunCommand, PretrainCommand, RewardCommand, ScpoCommand))


def _allocate(command: AllocateCommand) -> None:
    from goal.allocation import allocate_log, calibrated_multiplier, write_amounts

    _require_parquet("--amounts", command.amounts)
    if command.log.resolve() in (command.amounts.resolve(), *command.amounts.resolve().parents):
        raise ConfigurationError(
            f"--amounts {command.amounts}: is the log, or would be read as a part of it; give it another place"
        )
    multiplier = command.multiplier
    if multiplier is None:
        multiplier, warning = calibrated_multiplier(command.out)
        if warning:
            print(f"goal: {warning}", file=sys.stderr)
    table = allocate_log(command.out, command.log, multiplier=multiplier, schema=command.schema)
    write_amounts(table, command.amounts)
    print(f"amounts of {len(table)} users under multiplier {multiplier:g} in {command.amounts}")


def _build_vocabulary(command: VocabularyCommand) -> None:
    from goal.tokenizer import IncentiveTokenizer

    if command.amounts is None or command.column is None or command.config.log is not None:
        raise ConfigurationError("--amounts FILE and --column NAME belong together, and exclude --log and --schema")
    settings = command.config.vocabulary
    tokenizer = IncentiveTokenizer.fit_parquet(command.amounts, command.column, **dataclasses.asdict(settings))
    folder = command.out or DEFAULT_FOLDER / command.amounts.stem
    if (folder / "config.json").is_file():
        raise ConfigurationError(f"{folder}: holds a run, whose vocabulary would be replaced; choose another --out")
    tokenizer.save(folder)
    print(f"{tokenizer.statistics} (in {folder})")


def _print_summary(summary: dict[str, Any], folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("multiplier", "revenue", "cost", "ROI", "RVR", "value", "oracle", "best constant")
    for row in summary["sweep"]:
        names = ("multiplier", "rev", "cost", "roi", "rvr", "value", "oracle_value", "reference_value")
        table.add_row(*("–" if row[name] is None else f"{row[name]:.3f}" for name in names))
    console = Console()
    console.print(table)
    roi = "no cost" if summary["roi"] is None else f"ROI {summary['roi']:.3f}"
    estimate = " (estimates by the reward model)" if summary["estimate"] else ""
    if not summary["feasible"]:
        console.print(f"No multiplier meets the target {summary['roi_target']:g}; the safest is shown.")
    console.print(
        f"multiplier {summary['multiplier']:.3f}: {roi} against a target of {summary['roi_target']:g}, revenue "
        f"{summary['rev']:.3f} and cost {summary['cost']:.3f} per interaction{estimate}"
    )
    if summary.get("window") is not None:  # runs of earlier versions have none
        beside = "" if summary["oracle_rvr"] is None else f"; the oracle's at the same ROI {summary['oracle_rvr']:.1%}"
        console.print(
            f"ROI violation rate {summary['rvr']:.1%} of windows of {summary['window']:,} interactions, one every "
            f"{summary['stride']:,}{beside}{estimate}"
        )
    console.print(f"{folder / 'report.html'} after {summary['wall_seconds']:.0f} s")


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `goal` command."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--version"]:
        print(f"goal {version('goal-incentives')}")
        return
    command = None
    try:
        command = _parse(arguments)
        _execute(command)
    except (GoalError, ValueError, OSError, FloatingPointError, json.JSONDecodeError) as error:
        if "--debug" in arguments:
            raise
        print(f"goal: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        what = "goes on where this one stopped" if _goes_on(command) else "starts from the beginning"
        print(f"goal: interrupted; the same command {what}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
