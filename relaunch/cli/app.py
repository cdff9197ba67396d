"""Start, inspect and control training jobs and their nodes. `relaunch --help` lists commands."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relaunch.cli.nodes import nodes_app
from relaunch.cli.notify import notify_app
from relaunch.cli.terminal import (
    Job,
    Json,
    Reason,
    RequiredReason,
    guard_output,
    print_json,
    print_line,
    run_with_client,
    say,
)
from relaunch.config import ConfigError, Settings, read_settings

if TYPE_CHECKING:
    from temporalio.client import Client

    from relaunch.cli.jobs import JobSnapshot
    from relaunch.messages.logs import ReadStacksOutput

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, help=__doc__
)
policy_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Policies: what is tried after a fault, and how often.",
)
app.add_typer(nodes_app, name="nodes")
app.add_typer(policy_app, name="policy")
app.add_typer(notify_app, name="notify")

PolicyName = Annotated[str, typer.Argument(metavar="FILE|PRESET")]
State = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="State folder; default RELAUNCH_STATE or .relaunch."),
]
BAD_INPUT = 2
LONGEST_PERIOD = timedelta(days=36500)
"""Longest duration that `report` takes. Python's dates begin with the year 1."""
MAX_SENTENCE = 1500
"""Characters of an error that are printed: words of a command line that it quotes may be long."""


def _print_version(wanted: bool) -> None:
    if wanted:
        import platform
        from importlib.metadata import version

        print(f"relaunch {version('relaunch')}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def _take_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def up(
    state: State = None,
    port: Annotated[
        int, typer.Option(help="Port of the Temporal server; 0: any free port.")
    ] = 7233,
    ui_port: Annotated[
        int | None, typer.Option(help="Port of the web UI; default: port + 1000.")
    ] = None,
    fleet: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Fleet file; default: 16 nodes on this machine."),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=0, help="How many workers, each for RELAUNCH_JOBS jobs.")
    ] = 1,
    ip: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Where server and web UI listen; loopback only, because they have no TLS.",
        ),
    ] = "127.0.0.1",
    attended: Annotated[bool, typer.Option(hidden=True)] = False,
    attended_job: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the server, the web UI and workers in this terminal. Ctrl-C stops them; ranks keep
    running."""
    import asyncio

    from relaunch.cli import files, service
    from relaunch.cli.backup import describe_restored
    from relaunch.temporal import data_converter

    settings = read_settings(state=state)
    service.check_host(ip)
    data_converter(settings)  # keys that cannot be used are found before anything is started
    fleets = tuple(fleet or settings.fleets)
    known = [files.read_fleet(path) for path in fleets]
    lock = service.prepare_state(settings.state)
    if (restored := describe_restored(settings.state)) is not None:
        say(restored)
        workers = 0
    chosen = service.choose_port("--port", port, ip)
    ui = service.choose_port(
        "--ui-port", ui_port if ui_port is not None else chosen + 1000 if port else 0, ip
    )
    with lock:
        if not fleets:
            fleets = (service.write_local_fleet(settings.state, service.LOCAL_NODES),)
            known = [files.read_fleet(path) for path in fleets]
        backends = {spec.name: spec.backend for spec in known}
        asyncio.run(
            service.serve(
                service.Service(
                    settings.state,
                    chosen,
                    ui,
                    fleets,
                    backends,
                    workers,
                    settings.metrics,
                    settings.temporal_bin,
                    ip,
                ),
                say,
                attended=attended,
                attended_job=attended_job,
            )
        )


@app.command(hidden=True)
def warm(state: Annotated[Path, typer.Argument(metavar="DIR")]) -> None:
    """Serve other commands from a process with everything imported. `up` starts and restarts it."""
    from relaunch.cli.warm import serve

    serve(state, main)


Within = Annotated[
    str, typer.Option(metavar="DURATION", help="How long to wait until nothing is left.")
]


@app.command()
def upgrade(within: Within = "1m") -> None:
    """Have this installation's worker work for all jobs, while they run. Start it beside the old
    one first. Exit with 1 if something is left on another build."""

    async def work(client: Client, settings: Settings) -> int:
        from relaunch.cli import upgrade as moving

        seconds = moving.parse_within(within)
        return await moving.upgrade(client, settings.task_queue, settings.build, say, seconds)

    raise typer.Exit(run_with_client(work))


@app.command()
def rollback(
    build: Annotated[
        str | None, typer.Argument(metavar="BUILD", help="Default: the one before.")
    ] = None,
    within: Within = "1m",
) -> None:
    """Return to the build before the current one, or to BUILD, while jobs run. Its worker must
    run."""

    async def work(client: Client, settings: Settings) -> int:
        from relaunch.cli import upgrade as moving

        seconds = moving.parse_within(within)
        return await moving.rollback(client, settings.task_queue, build, say, seconds)

    raise typer.Exit(run_with_client(work))


@app.command()
def doctor(as_json: Json = False) -> None:
    """Examine the service itself: server, workers' builds, workflows whose tasks fail. Exit with 1
    if something is wrong."""
    from relaunch.cli import doctor as examining

    async def work(client: Client, settings: Settings) -> list[examining.Check]:
        return await examining.examine_service(client, settings.task_queue)

    found = run_with_client(work)
    print_json([examining.row(one) for one in found]) if as_json else print(
        "\n".join(examining.lines(found))
    )
    raise typer.Exit(any(one.action for one in found))


@app.command()
def backup(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.")],
    state: State = None,
) -> None:
    """Copy what `up` keeps in its state folder, also while it runs: database, archived incidents,
    environments of jobs. docs/operations.md says how to restore it."""
    from relaunch.cli.backup import back_up

    size = back_up(read_settings(state=state).state, folder)
    print(f"{folder} has the backup: {size / 2**20:.1f} MiB; it may contain secrets of jobs")


@app.command("codec-server")
def codec_server(
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS:PORT", help="Another than loopback needs TLS.")
    ] = "127.0.0.1:8081",
    ui: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The only web UI whose pages may call; default: `up`'s."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Default: codec-token in the state folder, made once."),
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TLS certificate chain, in PEM.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The certificate's private key, in PEM.")
    ] = None,
    state: State = None,
) -> None:
    """Decrypt payloads for Temporal's web UI, and print the address to enter there. Ctrl-C ends
    it."""
    from relaunch.cli import codec_server as serving

    settings = read_settings(state=state)
    options = serving.choose_options(settings, listen, ui, token_file, certificate, key)
    serving.serve(settings, options, say)


def _accept(*names: str) -> Any:
    """Return an option of torchrun that is accepted; docs/launchers.md says what it does."""
    return typer.Option(*names, hidden=True)


@app.command(
    context_settings={
        "allow_interspersed_args": False,
        # torchrun has every option also with underscores.
        "token_normalize_func": lambda word: word.replace("_", "-"),
    }
)
def run(
    context: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT.py|-- CMD…", show_default=False)
    ] = None,
    nodes: Annotated[
        str,
        typer.Option(
            "--nodes",
            "--nnodes",
            metavar="N|MIN:MAX",
            help="Number of nodes; 3:4: four, or three if no more are free.",
        ),
    ] = "1",
    nproc: Annotated[
        str,
        typer.Option(
            "--nproc",
            "--nproc-per-node",
            metavar="N|gpu|cpu|auto",
            help="Ranks on each node; gpu, cpu: as many as this machine has; auto: gpu, else cpu.",
        ),
    ] = "1",
    module: Annotated[
        bool, typer.Option("--module", "-m", help="The first word is a Python module.")
    ] = False,
    no_python: Annotated[
        bool, typer.Option("--no-python", help="The first word is a program, not a script.")
    ] = False,
    max_restarts: Annotated[
        int | None, typer.Option(min=0, help="Overrides the policy's; default of the policy: 8.")
    ] = None,
    log_pattern: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX", help="Reads progress from the output, such as 'step (?P<step>\\d+)'."
        ),
    ] = None,
    progress: Annotated[
        str | None, typer.Option(metavar="NAME", help="A preset of such patterns.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="merged|separate",
            help="separate: each rank's stderr has a separate log, and is printed to stderr.",
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Where checkpoints are: `show` says the newest."),
    ] = None,
    warm: Annotated[
        str | None,
        typer.Option(
            metavar="MODULES",
            help="Modules to import ahead, such as torch,transformers: ranks start faster again.",
        ),
    ] = None,
    policy: Annotated[str | None, typer.Option(help="A preset or a file.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the job; default: the script's name and the time.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VALUE]",
            help="Environment variable for the ranks; on this machine they have all of the shell.",
        ),
    ] = None,
    fleet: Annotated[str | None, typer.Option(help="A fleet's name.")] = None,
    standalone: Annotated[bool, _accept("--standalone")] = False,
    run_path: Annotated[bool, _accept("--run-path")] = False,
    virtual_local_rank: Annotated[bool, _accept("--virtual-local-rank")] = False,
    rdzv_backend: Annotated[str | None, _accept("--rdzv-backend")] = None,
    rdzv_endpoint: Annotated[str | None, _accept("--rdzv-endpoint")] = None,
    rdzv_id: Annotated[str | None, _accept("--rdzv-id")] = None,
    rdzv_conf: Annotated[str | None, _accept("--rdzv-conf")] = None,
    monitor_interval: Annotated[str | None, _accept("--monitor-interval")] = None,
    start_method: Annotated[str | None, _accept("--start-method")] = None,
    event_log_handler: Annotated[str | None, _accept("--event-log-handler")] = None,
    role: Annotated[str | None, _accept("--role")] = None,
    log_dir: Annotated[str | None, _accept("--log-dir")] = None,
    redirects: Annotated[str | None, _accept("--redirects", "-r")] = None,
    tee: Annotated[str | None, _accept("--tee", "-t")] = None,
    local_ranks_filter: Annotated[str | None, _accept("--local-ranks-filter")] = None,
    duplicate_stdout_filters: Annotated[str | None, _accept("--duplicate-stdout-filters")] = None,
    duplicate_stderr_filters: Annotated[str | None, _accept("--duplicate-stderr-filters")] = None,
    node_rank: Annotated[str | None, _accept("--node-rank")] = None,
    master_addr: Annotated[str | None, _accept("--master-addr")] = None,
    master_port: Annotated[str | None, _accept("--master-port")] = None,
    local_addr: Annotated[str | None, _accept("--local-addr")] = None,
    logs_specs: Annotated[str | None, _accept("--logs-specs")] = None,
    log_line_prefix_template: Annotated[str | None, _accept("--log-line-prefix-template")] = None,
    numa_binding: Annotated[str | None, _accept("--numa-binding")] = None,
    signals_to_handle: Annotated[str | None, _accept("--signals-to-handle")] = None,
    shutdown_timeout: Annotated[str | None, _accept("--shutdown-timeout")] = None,
) -> None:
    """Run one job to its end, as torchrun would. Print what its ranks print, and exit with its exit
    code. Start a server for the job if none is running. torchrun's options are accepted. Ctrl-C
    cancels the job: ranks get SIGTERM, not SIGINT as from torchrun."""
    from relaunch.cli import run as runner

    settings = read_settings()
    if log_pattern is not None and progress is not None:
        raise ConfigError("--log-pattern and --progress: expected only one of them")
    fields = {
        "name": name,
        "policy": policy,
        "fleet": fleet,
        "output": output,
        "checkpoint": None if checkpoint is None else {"directory": checkpoint},
        "progress": progress if log_pattern is None else {"log_pattern": log_pattern},
        "warm": None if warm is None else warm.split(","),
    }
    options = {
        parameter.name: str(context.params[parameter.name])
        for parameter in context.command.params
        if parameter.name
        and getattr(parameter, "hidden", False)
        and context.params[parameter.name] not in (None, False)
    }
    request = runner.RunRequest(
        words=command or [],
        nodes=nodes,
        ranks=nproc,
        fields={key: value for key, value in fields.items() if value is not None},
        env=env or [],
        max_restarts=max_restarts,
        module=module,
        no_python=no_python,
        options=options,
    )
    raise typer.Exit(runner.run(settings, request, say))


@app.command(context_settings={"allow_interspersed_args": False})
def init(
    command: Annotated[list[str] | None, typer.Argument(metavar="[-- torchrun …]")] = None,
    file: Annotated[Path, typer.Option(metavar="JOB.yaml", help="The file to write.")] = Path(
        "job.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a job file: from a command line of torchrun, or from answers to five questions."""
    from relaunch.cli import clients
    from relaunch.cli.init import write

    spec = write(file, command or (), force, sys.stdin.isatty())
    if (notice := clients.find_notice(spec.command)) is not None:
        say(notice)
    print(f"{file} written: {spec.size}; start it with `relaunch submit {file}`")


@app.command()
def submit(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml")],
    name: Annotated[str | None, typer.Option(help="Overrides the file's.")] = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="N|MIN:MAX", help="Overrides the file's.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Overrides the file's nproc_per_node.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="A preset or a file; overrides the job file's.")
    ] = None,
    fleet: Annotated[str | None, typer.Option(help="Overrides the file's.")] = None,
    reason: Reason = "",
    follow: Annotated[
        bool, typer.Option(help="Wait until the job ends; exit with its exit code.")
    ] = False,
) -> None:
    """Submit the job that a file describes."""
    from relaunch.cli import clients, files

    flags = {
        "name": name,
        "nodes": nodes,
        "nproc_per_node": nproc,
        "policy": policy,
        "fleet": fleet,
    }
    spec, resolved = files.read_job(
        job, {key: value for key, value in flags.items() if value is not None}
    )
    if (notice := clients.find_notice(spec.command)) is not None:
        say(notice)

    async def work(client: Client, settings: Settings) -> int:
        from relaunch.cli import submit

        placed = submit.set_working_folder(spec, client, settings.state)
        await submit.submit(
            client,
            settings.task_queue,
            placed,
            resolved,
            reason,
            hides_causes=settings.hides_causes,
        )
        print(f"job {spec.name} submitted: {spec.size}", flush=True)
        if not follow:
            return 0
        from relaunch.cli.follow import follow_lines, follow_live

        return await (
            follow_live(client, spec.name)
            if sys.stdout.isatty()
            else follow_lines(client, spec.name, print_line)
        )

    raise typer.Exit(run_with_client(work))


@app.command("jobs")
def list_jobs(
    as_json: Json = False,
    web: Annotated[
        bool, typer.Option("--web", help="Print links that save views in the web UI, instead.")
    ] = False,
) -> None:
    """List all jobs, running and ended."""
    from relaunch.cli import jobs, tables

    if web:
        from relaunch.cli.web_views import list_links, require_web_ui, web_lines

        async def find(client: Client, settings: Settings) -> tuple[str, str]:
            return require_web_ui(client, settings), client.namespace

        where = run_with_client(find)
        print_json(dict(list_links(*where))) if as_json else print("\n".join(web_lines(*where)))
        return
    rows = run_with_client(lambda client, _: jobs.list_jobs(client))
    print_json([tables.row(row) for row in rows]) if as_json else tables.print_jobs(
        rows, datetime.now(UTC)
    )


@app.command()
def show(job: Job, as_json: Json = False) -> None:
    """Show one job: its phase, the reason, and what happens next."""
    from relaunch.cli import past_runs, tables

    async def work(client: Client, settings: Settings) -> tuple[JobSnapshot, Any]:
        from relaunch.cli import checkpoints, jobs

        now = await jobs.load_job(client, job)
        return now, await checkpoints.read(client, settings.task_queue, now.state)

    now, checkpoint = past_runs.run_with_job(job, work)
    view = {**tables.show_view(now, datetime.now(UTC)), "checkpoint": checkpoint}
    print_json(view) if as_json else tables.print_show(view, now)


@app.command("next")
def next_(job: Job, as_json: Json = False) -> None:
    """Print what happens next to a job, and when."""
    from relaunch.cli import job_views, jobs, tables

    now = datetime.now(UTC)
    view = tables.show_view(run_with_client(lambda client, _: jobs.load_job(client, job)), now)[
        "next"
    ]
    print_json(view) if as_json else print(
        view["what"] + (f", {job_views.moment_text(view['at'], now)}" if view["at"] else "")
    )


@app.command()
def history(job: Job, as_json: Json = False) -> None:
    """Show all incidents of a job, and the decisions about each."""

    async def work(
        client: Client, settings: Settings
    ) -> tuple[list[dict[str, Any]], str | None, dict[str, Any] | None]:
        from relaunch.cli import checkpoints, job_views, jobs

        now = await jobs.load_job(client, job)
        incidents, missing = await jobs.incidents(client, settings.task_queue, now)
        assert now.state is not None, "else its incidents cannot be read"
        checkpoint = None
        if not as_json:
            checkpoint = await checkpoints.read(client, settings.task_queue, now.state)
        entries = [job_views.history_entry(one, now.state) for one in incidents]
        return entries, missing, checkpoint

    from relaunch.cli import past_runs, tables

    entries, missing, checkpoint = past_runs.run_with_job(job, work)
    print_json(entries) if as_json else tables.print_history(job, entries, checkpoint)
    if missing:
        say(missing)


@app.command()
def report(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]")] = None,
    fleet: Annotated[
        str | None, typer.Option(metavar="NAME", help="Report on all jobs of a fleet together.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Only jobs that ran, and faults, within that: 7d."),
    ] = None,
    checkpoint_cost: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="How long saving a checkpoint keeps ranks from training; default: as they report.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as one page.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a job's time went into, what its faults cost, and what would have helped."""
    from relaunch.cli import past_runs, report_views, reports
    from relaunch.fields import parse_duration
    from relaunch.job.report import make_report

    if (job is None) == (fleet is None and since is None):
        raise ConfigError(
            "report: expected either a job, or --fleet NAME, --since DURATION or both"
        )

    def read_duration(option: str, text: str | None) -> timedelta | None:
        try:
            found = None if text is None else parse_duration(text)
        except ValueError as error:
            raise ConfigError(f"{option}: {error}") from None
        if found is not None and not (isinstance(found, timedelta) and found):
            raise ConfigError(f"{option}: {text!r} is not a duration above 0, such as 30s or 7d")
        if found is not None and found > LONGEST_PERIOD:
            raise ConfigError(
                f"{option}: {text!r} is too long: expected at most {LONGEST_PERIOD.days}d"
            )
        return found

    now = datetime.now(UTC)
    period = read_duration("--since", since)
    cost = read_duration("--checkpoint-cost", checkpoint_cost)
    start = None if period is None else now - period

    async def work(client: Client, settings: Settings) -> list[reports.ReadJob]:
        if job is not None:
            return [await reports.read_job(client, settings, job)]
        return await reports.read_jobs(client, settings, fleet, start)

    read = past_runs.run_with_job(job, work) if job is not None else run_with_client(work)
    made = make_report([one.record for one in read], now, since=start, checkpoint_cost=cost)
    links = {one.record.state.name: one.links for one in read}

    def link(name: str, at: datetime) -> str | None:
        found = links[name]
        return None if found is None else found.find(at)

    view = report_views.report_view(made, link)
    if html is not None:
        from relaunch.cli import report_page

        report_page.write_page(view, html)
        say(f"the report is in {html}")
    if as_json:
        print_json(view)
    elif html is None:
        print("\n".join(report_views.report_lines(view)))
    for sentence in made.missing:
        say(sentence)


@app.command()
def follow(job: Job) -> None:
    """Watch a job until it ends; exit with its exit code."""

    async def work(client: Client, _: Settings) -> int:
        from relaunch.cli.follow import follow_lines, follow_live

        return await (
            follow_live(client, job)
            if sys.stdout.isatty()
            else follow_lines(client, job, print_line)
        )

    raise typer.Exit(run_with_client(work))


@app.command()
def logs(
    job: Job,
    rank: Annotated[int | None, typer.Option(help="Only this rank.")] = None,
    generation: Annotated[
        int | None, typer.Option(help="Default: the newest that has started.")
    ] = None,
    tail: Annotated[
        int | None, typer.Option(min=0, help="Start with this many last lines of each rank.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Start with what was printed in the last 10m, 2h."),
    ] = None,
    grep: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Only lines that match this regular expression."),
    ] = None,
    stream: Annotated[
        str | None,
        typer.Option(
            metavar="stdout|stderr",
            help="Only this stream, of a job with `output: separate`.",
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Wait for new output until the job ends, also across restarts; with --generation, "
            "until its ranks end.",
        ),
    ] = False,
) -> None:
    """Print the output of the ranks of one generation. Exit with 1 if a rank's was not found."""
    from relaunch.cli import past_runs

    async def work(client: Client, settings: Settings) -> int:
        from relaunch.cli import logs as reading

        selection = reading.parse_selection(rank, tail, since, grep, stream)
        if follow and generation is None:
            from relaunch.cli.follow import follow_logs

            return await follow_logs(client, settings.task_queue, job, selection, say)
        return await reading.print_job_logs(
            client, settings.task_queue, job, generation, selection, follow, say
        )

    raise typer.Exit(past_runs.run_with_job(job, work, with_worker=True))


@app.command()
def stacks(
    job: Job,
    rank: Annotated[int | None, typer.Option(help="Only this rank.")] = None,
    as_json: Json = False,
) -> None:
    """Show where the ranks of a job are executing now, grouped by place, the widest group first;
    with --rank, all threads and processes of that rank."""

    async def work(client: Client, settings: Settings) -> ReadStacksOutput:
        from relaunch.cli import stacks as reading

        return await reading.read(client, settings.task_queue, job, rank)

    from relaunch.cli import stacks as printing

    found = run_with_client(work)
    print_json([printing.row(one) for one in found.stacks]) if as_json else print(
        "\n".join(printing.lines(found, rank))
    )


@app.command()
def cancel(job: Job, reason: Reason = "") -> None:
    """Stop every rank of a job and end it as CANCELLED."""
    from relaunch.cli import jobs

    is_taken = run_with_client(lambda client, _: jobs.cancel(client, job, reason))
    print(f"job {job}: cancellation requested{'' if is_taken else jobs.UNCONFIRMED}")


@app.command()
def retry(
    job: Job,
    reason: Reason = "",
    avoid: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="Do not use this node again.")
    ] = None,
    renew_budgets: Annotated[
        bool, typer.Option("--renew-budgets", help="Restore all budgets in full.")
    ] = False,
) -> None:
    """Relaunch a running job, or start an ended one again with its history."""
    from relaunch.cli import submit

    print(
        run_with_client(
            lambda client, s: submit.retry(
                client,
                s.task_queue,
                job,
                reason,
                tuple(avoid or ()),
                renew_budgets,
                s.hides_causes,
            )
        )
    )


@app.command()
def answer(
    job: Job,
    decision: Annotated[str, typer.Argument(metavar="approve|deny|snooze|take-over")],
    reason: RequiredReason,
    within: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="With snooze: how long to wait before asking again; default 1h.",
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            metavar="NODE",
            help="Answer the request to drain this node. approve: leave it now; deny: at the "
            "deadline.",
        ),
    ] = None,
) -> None:
    """Answer what a job asks. Approve or deny it, be asked again later (snooze), or have relaunch
    take no further action on it (take-over). With --node, answer the request that the job leave
    that node."""
    from relaunch.cli import answers

    print(
        run_with_client(
            lambda client, _: answers.for_job(client, job, decision, reason, within, node)
        )
    )


@policy_app.command("presets")
def presets() -> None:
    """List the presets, and what each does."""
    from relaunch.cli.policy_views import presets_lines

    print("\n".join(presets_lines()))


@policy_app.command("check")
def check(file: Annotated[str, typer.Argument(metavar="FILE")]) -> None:
    """Check whether a policy can be used."""
    from relaunch.cli import policies

    policies.read(file)
    print(f"{file} is a valid policy")


@policy_app.command("explain")
def explain_policy(
    policy: PolicyName,
    cause: Annotated[str | None, typer.Option(help="Only its ladder.")] = None,
    as_json: Json = False,
) -> None:
    """Draw the ladders of a policy: what is tried, how often, and what follows."""
    from relaunch.cli import policies, policy_views

    known = policies.read(policy)
    only = policies.parse_cause(cause) if cause else None
    print_json(policy_views.policy_view(policy, known, only)) if as_json else print(
        "\n".join(policy_views.policy_lines(policy, known, only))
    )


@policy_app.command("change")
def change_policy(
    job: Job,
    reason: RequiredReason,
    file: Annotated[str | None, typer.Argument(metavar="FILE|PRESET")] = None,
    values: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Such as max_restarts=12."),
    ] = None,
) -> None:
    """Override keys in the policy of a running job, from its next decision on."""
    from relaunch.cli import policies

    changes = policies.read_changes(file, values or [])
    print(
        "\n".join(run_with_client(lambda client, _: policies.change(client, job, changes, reason)))
    )


@policy_app.command("replay")
def replay_policy(
    policy: PolicyName,
    history: Annotated[
        str | None, typer.Option(metavar="JOB", help="Replay the events of this job.")
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option(
            "--run", metavar="RUN_ID", help="A run of an earlier submission; default: the newest."
        ),
    ] = None,
    events: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Replay the events in this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a policy would have decided, and where the actual decisions differ."""
    from relaunch.cli import policies, policy_replay

    if (history is None) == (events is None) or (run_id and events):
        raise ConfigError(
            "policy replay: expected either --history JOB [--run RUN_ID] or --events FILE.jsonl"
        )
    known = policies.read(policy)
    if events is not None:
        trial = policy_replay.try_on_events(known, events)
    else:
        trial = run_with_client(
            lambda client, _: policy_replay.try_on_history(client, str(history), known, run_id)
        )
    print_json(policy_replay.trial_view(trial)) if as_json else print(
        "\n".join(policy_replay.trial_lines(trial))
    )
    for note in trial.notes:
        say(note)


# A negative number is an exit, not an option: `explain exit -9`.
@app.command("explain", context_settings={"ignore_unknown_options": True})
def explain_evidence(
    kind: Annotated[str, typer.Argument(metavar="xid|npu|exit|dcgm|log|kernel")],
    what: Annotated[str, typer.Argument(metavar="NUMBER|CODE|FILE", help="- is standard input.")],
    exit_code: Annotated[
        int | None,
        typer.Option(
            help="Exit code of dcgmi, or of the rank whose log it is: -9 is SIGKILL; by default 1."
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|PRESET", help="Use its catalog, and show which rung it takes first."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain a piece of evidence: an Xid, an NPU's code, an exit, dcgmi's output, or a log."""
    from relaunch.cli import explain

    known = None
    if policy is not None:
        from relaunch.cli import policies

        known = policies.read(policy)
    explanation = explain.explain(kind, what, exit_code, known)
    print_json(explain.view_of(explanation, known)) if as_json else print(
        "\n".join(explain.lines_of(explanation, known, policy))
    )


def _explain_usage(mistake: typer.TyperException) -> int:
    """Print one sentence about a command line that cannot be parsed; return the exit code."""
    from relaunch.text import printable

    context, message = getattr(mistake, "ctx", None), mistake.format_message()
    if context is None:
        say(printable(message))
    elif message == context.get_help():  # of a group of commands, without a command
        print(message, file=sys.stderr)
    else:
        message = message[:1].lower() + message[1:].removesuffix(".")
        message = message.replace("Input should be", "expected").partition(", unable to parse")[0]
        # Numbers are parsed by pydantic, whose error has the value, as typed.
        parsed: list[Any] = getattr(mistake.__context__ or mistake.__cause__, "errors", list)()
        typed = f" (got {parsed[0]['input']!r})" if parsed else ""
        end = "" if message.endswith("?") else ";"
        say(printable(f"{message}{typed}{end} `{context.command_path} --help` lists what it takes"))
    return mistake.exit_code


def main() -> int:
    """Run the command line and return its exit code; a `ConfigError` prints one sentence and
    returns 2."""
    with guard_output():
        return _run()


def _run() -> int:
    try:
        code = app(prog_name="relaunch", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except typer.TyperException as mistake:
        return _explain_usage(mistake)
    except typer.Abort:
        return 1
    except ConfigError as mistake:
        from relaunch.text import printable

        say(printable(str(mistake), MAX_SENTENCE))
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `relaunch jobs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        # The SDK is imported only by commands that use it.
        service = sys.modules.get("temporalio.service")
        if service is None or not isinstance(error, service.RPCError):
            raise
        from relaunch.temporal import explain_refusal
        from relaunch.text import printable

        say(printable(str(explain_refusal(error)), MAX_SENTENCE))
        return BAD_INPUT
    return 0
