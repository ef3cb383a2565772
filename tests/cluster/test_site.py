"""The site file: where it is looked for, what it may hold, how it is written from what a machine tells."""

from __future__ import annotations

import pwd
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from oocdl.cluster import detect, site
from oocdl.cluster.detect import find_site, interface_to, site_text, write_site
from oocdl.cluster.job_options import JobOptions, job_settings
from oocdl.errors import InputError
from oocdl.host.paths import cache_folder, state_folder

ALL = """
[slurm]
cores = 4
memory = "8GiB"
walltime = "02:00:00"
queue = "site"
prologue = ["module load gcc"]
[pbs]
cores = 5
"""
SINFO = """
echo 'debug@2@4000@30:00@127.0.0.1'
echo 'long*@64@257000+@7-00:00:00@127.0.0.1'
echo 'long*@32@129000@7-00:00:00@127.0.0.1'
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a batch system, and without a site file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(site, "SYSTEM_SITE", tmp_path / "etc" / "site.toml")
    monkeypatch.delenv("OOCDL_SITE", raising=False)
    monkeypatch.delenv("SGE_ROOT", raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def command(home: Path, name: str, lines: str = "") -> None:
    file = home / "bin" / name
    file.write_text(f"#!{shutil.which('bash', path='/bin:/usr/bin')}\n{lines}")
    file.chmod(0o755)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_what_is_given_goes_before_the_site_file(home: Path) -> None:
    write(home / "config" / "oocdl" / "site.toml", ALL)
    settings = job_settings("slurm", {"nodes": 3, "memory": "1GiB", "queue": None})
    assert (settings.nodes, settings.cores, settings.memory_bytes) == (3, 4, 1 << 30)
    assert (settings.queue, settings.walltime_seconds) == ("site", 7200)
    assert settings.prologue == ("module load gcc",)
    with pytest.raises(InputError, match=r"pbs needs memory, such as '60GB': .*site\.toml"):
        job_settings("pbs", {})


def test_the_first_site_file_holds(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def queue() -> str | None:
        return job_settings("slurm", {"cores": 1, "memory": "1GiB", "walltime": "01:00:00"}).queue

    assert queue() is None
    write(home / "config" / "oocdl" / "site.toml", "[slurm]\nqueue = 'mine'")
    assert queue() == "mine"
    write(home / "etc" / "site.toml", "[slurm]\nqueue = 'ours'")
    assert queue() == "ours"
    monkeypatch.setenv("OOCDL_SITE", str(write(home / "other.toml", "[slurm]\nqueue = 'other'")))
    assert queue() == "other"
    monkeypatch.setenv("OOCDL_SITE", str(home / "none.toml"))
    with pytest.raises(InputError, match=r"\$OOCDL_SITE names .*none\.toml"):
        queue()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[slurm]\nques = 'long'", r"site\.toml has 'ques' in \[slurm\] \(did you mean 'queue'"),
        ("[pbs]\nzzz = 1", r"site\.toml has 'zzz' in \[pbs\], which is none of nodes, "),
        ("[slurn]\n", r"site\.toml has 'slurn' \(did you mean 'slurm'"),
        ("slurm = 3", r"'slurm' is to be a table"),
        ("[slurm", r"site\.toml cannot be read: "),
        ("[slurm]\ncores = 'many'", r"cores must be .*site\.toml"),
    ],
)
def test_a_site_file_that_is_wrong(home: Path, text: str, words: str) -> None:
    write(home / "config" / "oocdl" / "site.toml", text)
    with pytest.raises(InputError, match=words):
        job_settings("slurm", {"memory": "1GiB", "walltime": "01:00:00"})


def test_a_site_file_that_may_not_be_reached_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not taken for one that is not there."""
    (home / "etc").symlink_to(home / "etc")
    with pytest.raises(InputError, match=r"the site file '.* cannot be reached: "):
        job_settings("slurm", {})
    monkeypatch.setenv("OOCDL_SITE", str(home / "etc" / "mine.toml"))
    with pytest.raises(InputError, match=r"\$OOCDL_SITE '.* cannot be reached: "):
        job_settings("slurm", {})


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for folder in (site.user_site, cache_folder, state_folder):
        with pytest.raises(InputError, match=r"nobody knows the home folder of user \d+: set HOME"):
            folder()


def test_slurm_is_found_with_its_default_partition(home: Path) -> None:
    command(home, "sbatch")
    command(home, "sinfo", SINFO)
    found = find_site()
    assert found.system == "slurm"
    wanted = {"queue": "long", "cores": 32, "memory": "129000MiB", "walltime": "7-00:00:00"}
    assert {key: found.values[key] for key in wanted} == wanted
    assert "scheduler_interface" not in found.values  # the loopback leads to no other host
    assert found.doubt is not None and "no route to nodes:" in found.doubt


IP = """case $4 in 10.0.0.*) echo "$4 dev ib0 src 10.0.0.9";;
10.1.*) echo "$4 via 10.0.1.1 dev eth1 src 10.0.1.9";;
8.8.8.8) echo "$4 via 10.9.0.1 dev eth0 src 10.9.0.5";; esac"""


@pytest.mark.parametrize(
    ("addresses", "interface", "words"),
    [
        (("10.0.0.1", "10.0.0.2"), "ib0", None),
        (("10.0.0.1", "10.1.0.1"), None, "by network interface eth1 and ib0: .* at that of eth0; .*set s"),
        (("10.0.0.1", "no.such.host.invalid"), None, "interface ib0, and others not at all:"),
    ],
)
def test_the_scheduler_listens_where_all_nodes_reach_it_or_it_is_said_that_nobody_knows(
    home: Path, addresses: tuple[str, ...], interface: str | None, words: str | None
) -> None:
    command(home, "sbatch")
    command(home, "sinfo", "\n".join(f"echo 'long*@64@4000@infinite@{address}'" for address in addresses))
    command(home, "ip", IP)
    found = find_site()
    assert found.values.get("scheduler_interface") == interface
    text = site_text(found)
    if words is None:
        assert found.doubt is None and f'\nscheduler_interface = "{interface}"' in text
    else:
        assert re.search(words, found.doubt or "") and "\n# Not certain: " in text
        assert tomllib.loads(text)["slurm"].get("scheduler_interface") is None


@pytest.mark.parametrize(
    ("commands", "system", "queue"),
    [
        ({"qsub": "", "qstat": "echo 'Queue  Max'; echo '------ ---'; echo 'workq  0'"}, "pbs", "workq"),
        ({"qsub": "", "qconf": "echo all.q"}, "sge", "all.q"),
        ({"bsub": "", "bqueues": "echo normal; echo night"}, "lsf", "normal"),
        ({"condor_submit": ""}, "htcondor", None),
        ({"qsub": "", "qstat": "exit 1"}, "pbs", None),
        ({"sbatch": "", "sinfo": "exit 1"}, "slurm", None),
    ],
)
def test_batch_systems_are_told_apart(
    home: Path, commands: dict[str, str], system: str, queue: str | None
) -> None:
    for name, lines in commands.items():
        command(home, name, lines)
    found = find_site()
    assert (found.system, found.values.get("queue")) == (system, queue)


QCONF = """case "$*" in -sql) echo all.q;; -spl) printf 'mpi\\nthreads\\nsmp2\\n';; -sel) echo 127.0.0.1;;
-sp*) echo "pe_name $2"; [ $2 = mpi ] && echo 'allocation_rule $fill_up' || echo 'allocation_rule $pe_slots';;
-sc) echo 'mem_free mf MEMORY <= YES %s 0 0';; esac"""


@pytest.mark.parametrize(("counted", "resources"), [("YES", "mem_free={memory_per_core}"), ("JOB", None)])
def test_sge_tells_who_gives_cores_of_one_host_and_how_memory_is_counted(
    home: Path, counted: str, resources: str | None
) -> None:
    command(home, "qsub")
    command(home, "qconf", QCONF % counted)
    found = find_site()
    wanted = {"queue": "all.q", "parallel_environment": "threads", "resources": resources}
    assert {key: found.values.get(key) for key in wanted} == wanted
    assert found.doubt is not None and "no route to nodes:" in found.doubt


@pytest.mark.parametrize("system", site.SYSTEMS)
def test_a_file_with_all_that_may_be_added_is_sound(home: Path, system: str) -> None:
    text = site_text(detect.Found(system, {"queue": 'a "b" \\'} if system == "slurm" else {}))
    every = re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE)
    write(home / "config" / "oocdl" / "site.toml", every.replace("shared", "# shared"))
    settings = job_settings(system, {})
    assert (settings.cores, settings.memory_bytes, settings.account) == (16, 60 * 10**9, "project")
    kept = set(tomllib.loads(every)[system])
    assert kept <= JobOptions.__annotations__.keys() and {"cores", "tls", "prologue"} <= kept


def test_it_is_written_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no batch system here"):
        write_site()
    command(home, "sbatch")
    command(home, "sinfo", SINFO)
    path, _ = write_site()
    assert path == home / "config" / "oocdl" / "site.toml"  # not everybody's, where this user may write too
    assert job_settings("slurm", {}).queue == "long"
    with pytest.raises(InputError, match=r"there is a site file .*--force"):
        write_site()
    path.write_text("")
    assert write_site(force=True)[0] == path and "long" in path.read_text()
    monkeypatch.setenv("OOCDL_SITE", str(home / "third" / "site.toml"))
    assert write_site()[0] == home / "third" / "site.toml"
    (home / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_site(home / "file" / "site.toml")
    with pytest.raises(InputError, match=r"cannot be written: .* is a folder"):
        write_site(home)


def test_the_interface_that_leads_to_a_host(home: Path) -> None:
    command(home, "ip", 'echo "$4 via 10.0.0.1 dev ib0 src 10.0.0.5"')
    assert interface_to("127.0.0.2") == "ib0"
    command(home, "ip", 'echo "local $4 dev lo src 127.0.0.1"')
    assert interface_to("127.0.0.2") is None
    assert interface_to("no.such.host.invalid") is None
