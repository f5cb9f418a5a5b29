"""The job's script, a pure function of the config: the same config gives the same bytes.

The run's directory is its argument (with an array's index behind it), so nothing in the text depends on where or when.
Values of the config stand in it as one word each: in quotes of bash, or, in `#SBATCH` lines, in those of sbatch, which
expands nothing.

How signals go: Slurm sends SIGUSR1 to this shell before the limit, and `alpagym stop` SIGUSR2; both are passed on to
the trainer's processes, through srun. SIGTERM is not: at a preemption Slurm sends it to the processes itself and leaves
the shell alone, and when a job is cancelled srun kills its processes at once.
"""

from __future__ import annotations

import re
import shlex

from alpagym_host.slurm.containers import fetch, in_container
from alpagym_host.slurm.roles import Role, node_count, roles
from alpagym_runtime.run_config import RunConfig
from alpagym_runtime.trainers.cosmos.config import is_spread

BASE = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "USER")
"""Variables that every job gets from where it is submitted; others are named in deploy.slurm.export_env."""

# What the nodes of a Cosmos-RL job share and nobody else knows; srun passes it on, and it is nowhere written.
_SECRET = ("export ALPAGYM_JOB_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",)
_STEP = "srun --export=ALL --overlap --cpu-bind=none --input=none --open-mode=append"
_SAFE = re.compile(r"[A-Za-z0-9._/:,=@%+-]*")


def render(config: RunConfig, command: str, python: str) -> str:
    """The script.

    Args:
        config: the run.
        command: train, evaluate or rollout.
        python: the interpreter on the nodes, where the config names none.

    """
    slurm, found = config.deploy.slurm, roles(config, command)
    lines = [
        "#!/bin/bash",
        "# Written by AlpaGym from a run's config. Its argument is the run's directory; of an array, less the index.",
        *_options(config, found),
        "",
        "asked= trainer=",
        'ask() { asked=$1; [ -z "$trainer" ] || kill -s "$asked" "$trainer"; }',
        "trap 'ask USR1' USR1  # the limit is near, or nobody drives any more",
        "trap 'ask USR2' USR2  # alpagym stop",
        "trap : TERM           # Slurm ends the processes itself",
        "",
        "run=${1:?is missing: the directory of the run}${SLURM_ARRAY_TASK_ID-} restarts=${SLURM_RESTART_COUNT:-0}",
        'echo "$(date "+%F %T") job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start $restarts: $run"',
        f"if ((restarts > {config.deploy.requeues})); then",
        f'  echo "not begun: more than deploy.requeues={config.deploy.requeues}; to go on: alpagym resume $run"',
        "  exit 1",
        "fi",
        'cd -- "$SLURM_SUBMIT_DIR" || exit',
        "export PYTHONUNBUFFERED=1  # logs as they grow",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(slurm.env.items())),
        *(_SECRET if is_spread(config) else ()),
        *fetch(slurm),
        "",
        *_starts(config, found, python),
        *_END.replace("REQUEUES", str(config.deploy.requeues)).splitlines(),
    ]
    return "\n".join(lines) + "\n"


def _options(config: RunConfig, found: list[Role]) -> list[str]:
    """The lines that sbatch reads."""
    slurm, topology = config.deploy.slurm, config.topology
    values: list[tuple[str, str | int | None]] = [
        ("job-name", slurm.job_name),
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("constraint", slurm.constraint),
        ("time", slurm.time),
        ("nodes", node_count(found)),
        ("ntasks-per-node", max(role.tasks_per_node for role in found)),
        ("gpus-per-node", topology.gpus_per_node or None),
        ("cpus-per-task", slurm.cpus_per_task),
        ("mem", slurm.mem),
        ("signal", f"B:USR1@{slurm.warn_s}"),
        ("open-mode", "append"),
        ("export", ",".join(sorted({*BASE, *slurm.export_env}))),
    ]
    lines = [f"#SBATCH --{name}={_quoted(str(value))}" for name, value in values if value is not None]
    lines += ["#SBATCH --exclusive"] if slurm.exclusive else []
    lines += ["#SBATCH --requeue" if config.deploy.requeues else "#SBATCH --no-requeue"]
    for option in slurm.extra:
        name, equals, value = option.partition("=")
        lines.append(f"#SBATCH {name}{equals}{_quoted(value)}")
    return lines


def _quoted(value: str) -> str:
    """A value as sbatch reads it in its script: in double quotes a backslash makes the next character a letter."""
    return value if _SAFE.fullmatch(value) else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _starts(config: RunConfig, found: list[Role], python: str) -> list[str]:
    """What starts the roles, the trainer last: the others wait for it."""
    slurm = config.deploy.slurm
    names = sorted({*slurm.env, *slurm.export_env})
    options, before = in_container(slurm, names, config.topology.gpus_per_node > 0)
    inside = shlex.quote(slurm.python or (python if slurm.container_image is None else "python3"))
    # AlpaSim's launcher starts containers, so it is in none.
    outside = shlex.quote(python if slurm.python is None or slurm.container_image is not None else slurm.python)

    lines = ['mkdir -p -- "$run/logs" || exit', f"step=({_STEP})", *(_BESIDES.splitlines() if found[1:] else ())]
    for role in found[1:]:
        if role.name == "simulator":
            start = _step(role, 1, [], [outside, "-m", "alpagym_host.launch.simulator", '"$run"'])
        else:
            worker = ["bash", "-c", shlex.quote(_WORKER), inside, str(config.rollout.restarts), '"$run"']
            start = _step(role, 0, options, [*before, *worker])
        lines.append(f"keep {role.name} {start} & {role.name}=$!")
    trainer = _step(found[0], 1, options, [*before, inside, "-m", "alpagym_host.launch.job", '"$run"'])
    return [
        *lines,
        '[ -n "$asked" ] || {',
        f"  {trainer} &",
        "  trainer=$!",
        '  [ -z "$asked" ] || ask "$asked"  # between the two',
        "}",
    ]


def _step(role: Role, kill: int, options: list[str], program: list[str]) -> str:
    """The command of bash that starts a role."""
    where = f"--relative={role.first} --nodes={role.nodes} --ntasks={role.tasks} --kill-on-bad-exit={kill}"
    output = f'--output="${{run//%/%%}}/logs/{role.name}-%N.log"'
    return " \\\n    ".join([f'"${{step[@]}}" {where}', " ".join([output, *options]), " ".join(program)])


# Where those are gone for whom the trainer waits, it is asked for a checkpoint.
_BESIDES = r"""rm -f -- "$run"/workers/rendezvous.json "$run"/endpoints/*.json  # of an earlier start
keep() {  # NAME COMMAND: a role besides the trainer's; SIGUSR2 is passed on
  local name=$1 pid code
  "${@:2}" & pid=$!
  trap 'kill -s USR2 "$pid" 2>/dev/null' USR2
  wait "$pid"; code=$?
  while kill -0 "$pid" 2>/dev/null; do wait "$pid"; code=$?; done
  ((code == 0)) || { echo "$name ended with code $code; see $run/logs"; kill -s USR1 $$; }
}"""

# A worker ends when its trainer does, by its connection, and with code 0 or 3; anything else is a crash.
_WORKER = r"""trap "" HUP INT TERM USR1 USR2
for ((start = 0; start <= $1; start++)); do
  "$0" -m alpagym_runtime.rollouts.worker "$2"; code=$?
  [ $code = 0 ] || [ $code = 3 ] && exit
  echo "$(date "+%F %T") worker $SLURM_PROCID ended with code $code; start $((start + 1)) of rollout.restarts=$1"
done
exit $code"""

_END = """
case $asked in USR1) code=138 ;; USR2) code=140 ;; esac
if [ -n "$trainer" ]; then
  wait "$trainer"; code=$?
  while kill -0 "$trainer" 2>/dev/null; do wait "$trainer"; code=$?; done  # a trap ends a wait too
  wait "$trainer" 2>/dev/null; last=$?; ((last == 127)) || code=$last
  trainer=
fi
echo "$(date "+%F %T") trainer ended with code $code"
[ -z "${simulator-}" ] || kill -s USR2 "$simulator"
for ((i = 0; i < 60; i++)); do  # the others end by themselves
  kill -0 ${rollout-} ${simulator-} 2>/dev/null || break
  sleep 0.5
done
# 138: asked by SIGUSR1; 143: by SIGTERM, which is a preemption if Slurm still calls the job a running one.
if ((code == 138 || code == 143)) && ((restarts < REQUEUES)) &&
  [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
  echo "queued again, $((restarts + 1)) of deploy.requeues=REQUEUES"
  scontrol requeue "$SLURM_JOB_ID" && sleep 600
fi
exit "$code"
"""
