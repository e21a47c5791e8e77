"""The files of `deploy/batch`: each checked by its own tool, and held against the code that they run."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import compose_spec
import kubernetes_validate
import pytest
import yaml
from huggingface_hub import JobHardware
from sqlalchemy.engine import make_url

from schemas.names import PRIVATE_FOLDER
from schemas.schedule import NewSchedule
from service.cli.console import EXIT_BLOCKED, EXIT_NOT_COMPLETE, EXIT_TRY_AGAIN, EXIT_USAGE
from service.cli.job_file import read_job_file
from service.settings import Settings
from service.work.worker_process import STOP_MARGIN_S

ROOT = Path(__file__).parents[2]
BATCH = ROOT / "deploy" / "batch"
UNITS = [BATCH / "quarry-nightly.service", BATCH / "quarry-nightly.timer"]
LAST_CODES = {EXIT_USAGE, EXIT_NOT_COMPLETE, EXIT_BLOCKED}
"""After which the same command is not run again."""
TERMINATED = 143


def test_every_file_is_on_the_page() -> None:
    page = (BATCH / "README.md").read_text()
    for path in BATCH.iterdir():
        assert path.name == "README.md" or f"({path.name})" in page, path.name


def test_the_job_is_a_request() -> None:
    assert read_job_file(BATCH / "nightly.yaml").hub is not None


def test_the_schedule_on_the_page_is_one() -> None:
    page = (ROOT / "docs" / "nightly.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert NewSchedule.model_validate(yaml.safe_load(text)).name == "nightly"


# systemd


@pytest.mark.outside
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_nothing_in_the_units() -> None:
    command = ["systemd-analyze", "verify", *UNITS]
    verified = subprocess.run(command, capture_output=True, text=True, check=True)
    assert verified.stdout + verified.stderr == ""


def unit() -> dict[str, str]:
    lines = UNITS[0].read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_the_unit_does_not_start_again_what_would_end_alike() -> None:
    assert unit()["Restart"] == "on-failure"
    assert {int(code) for code in unit()["RestartPreventExitStatus"].split()} == LAST_CODES
    assert int(unit()["SuccessExitStatus"]) == TERMINATED


def test_the_units_command_is_one_of_quarry(tmp_path: Path) -> None:
    """What the shell of the unit makes of it: `%%` is a percent sign there."""
    shell, option, line = shlex.split(unit()["ExecStart"].replace("%%", "%"))
    (tmp_path / "quarry").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "quarry").chmod(0o755)
    environment = {"STATE_DIRECTORY": "/var/lib/quarry", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    called = subprocess.run(
        [shell, option, line], env=environment, capture_output=True, text=True, check=True
    )
    assert re.fullmatch(
        r"extract /etc/quarry/nightly\.yaml --out /var/lib/quarry/\d{4}-\d\d-\d\d\n", called.stdout
    )


@pytest.mark.parametrize(("holds", "starts"), [(None, True), (PRIVATE_FOLDER, True), ("manifests", False)])
def test_a_restart_of_the_machine_goes_on_with_a_night_and_leaves_a_whole_one(
    tmp_path: Path, holds: str | None, starts: bool
) -> None:
    assert "OnBootSec=10min" in UNITS[1].read_text().splitlines()
    (tmp_path / "date").write_text("#!/bin/sh\necho 2026-06-10\n")
    (tmp_path / "date").chmod(0o755)
    if holds is not None:
        (tmp_path / "2026-06-10" / holds).mkdir(parents=True)
    environment = {"STATE_DIRECTORY": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = shlex.split(unit()["ExecCondition"].replace("%%", "%"))
    assert subprocess.run(command, env=environment, check=False).returncode == (0 if starts else 1)


def test_the_units_user_has_a_home_that_is_there() -> None:
    """`useradd --system` makes none, and the engine writes below it."""
    lines = UNITS[0].read_text().splitlines()
    assert f"Environment=HOME=/var/cache/{unit()['CacheDirectory']}" in lines


def test_only_nights_that_are_whole_are_removed_when_they_are_old(tmp_path: Path) -> None:
    (line,) = re.findall(r"^find .*$", (BATCH / "README.md").read_text(), re.MULTILINE)
    eight_days_ago = time.time() - 8 * 86_400
    for name, holds in (("2026-06-01", "manifests"), ("2026-06-02", PRIVATE_FOLDER), ("cache", "manifests")):
        (tmp_path / name / holds).mkdir(parents=True)
        os.utime(tmp_path / name, (eight_days_ago, eight_days_ago))
    (tmp_path / "2026-06-09" / "manifests").mkdir(parents=True)
    subprocess.run(["sh", "-c", line.replace("/var/lib/quarry/", f"{tmp_path}/")], check=True)
    assert {path.name for path in tmp_path.iterdir()} == {"2026-06-02", "2026-06-09", "cache"}


# Kubernetes


def objects() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((BATCH / "cronjob.yaml").read_text()))


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_kubernetes_takes_every_object(version: str) -> None:
    for found in objects():
        kubernetes_validate.validate(found, version, strict=True)


def test_the_cron_job_ends_what_would_end_alike_and_lets_units_drain() -> None:
    job = objects()[0]["spec"]["jobTemplate"]["spec"]
    (ends,) = [
        rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"
    ]
    assert (ends["operator"], set(ends["values"])) == ("In", LAST_CODES)
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == ends["containerName"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert float(variables["QUARRY_DRAIN_S"]) + STOP_MARGIN_S < pod["terminationGracePeriodSeconds"]
    settings = {f"QUARRY_{field.upper()}" for field in Settings.model_fields}
    assert {name for name in variables if name.startswith("QUARRY_")} <= settings
    assert "$(JOB_NAME)" in container["args"][-1] and "JOB_NAME" in variables
    assert {mount["name"] for mount in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert container["image"] == f"{project['name']}:{project['version']}"


# Compose


def with_variables(path: Path) -> str:
    text = re.sub(r"\$\{QUARRY_\w+_(DIR|FILE):\?[^}]*\}", "./there", path.read_text())
    return re.sub(r"\$\{\w+:\?[^}]*\}", "1", text)


def test_the_compose_specification_takes_both_files_and_they_fit_together() -> None:
    files = [ROOT / "deploy" / "compose.yaml", BATCH / "compose.yaml"]
    service, night = (
        compose_spec.PyCompose.from_yaml(with_variables(path)).to_dict()["services"] for path in files
    )
    assert night.keys() == service.keys() == {"quarry"}
    assert night["quarry"].keys() == {"command", "restart", "healthcheck"}


def test_the_overlay_for_postgresql_brings_a_server_and_its_url() -> None:
    path = ROOT / "deploy" / "compose.postgres.yaml"
    document = compose_spec.PyCompose.from_yaml(with_variables(path)).to_dict()
    server, service = document["services"]["postgres"], document["services"]["quarry"]
    assert service.keys() == {"depends_on", "environment"}
    url = make_url(service["environment"]["QUARRY_DATABASE_URL"])
    made = server["environment"]
    assert (url.host, url.drivername) == ("postgres", "postgresql+psycopg")
    assert (url.username, url.password, url.database) == (
        made["POSTGRES_USER"],
        made["POSTGRES_PASSWORD"],
        made["POSTGRES_DB"],
    )


# Slurm: see test_slurm.py


def test_the_batch_script_is_right_for_a_shell() -> None:
    subprocess.run(["bash", "-n", BATCH / "nightly.sbatch"], check=True)
    text = (BATCH / "nightly.sbatch").read_text()
    assert f"$code == {EXIT_TRY_AGAIN} || $code == {TERMINATED}" in text
    seconds = re.search(r"--signal=B:TERM@(\d+)", text)
    assert seconds is not None
    assert int(seconds[1]) > Settings().drain_s + STOP_MARGIN_S


# Hugging Face


class Jobs(BaseHTTPRequestHandler):
    """Answers as the Hub does to a scheduled job, and keeps what was sent."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.sent.append((self.path, self.headers["Authorization"], body))
        made = {"id": "1", "owner": {"id": "1", "name": "my-org", "type": "org"}, "status": {"lastJob": None}}
        answer = json.dumps(made | body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize("parts", [1, 2])
def test_the_recipe_schedules_the_job_with_the_real_client(parts: int) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Jobs) as server:
        server.sent = []
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        options = ["--namespace", "my-org", "--image", "registry/quarry:1", "--input", "my-org/nightly"]
        options += ["--parts", str(parts)] if parts > 1 else []
        done = subprocess.run(
            [sys.executable, BATCH / "hugging_face.py", *options],
            env=os.environ | {"HF_ENDPOINT": address, "HF_TOKEN": "hf_secret"},
            capture_output=True,
            text=True,
            check=False,
        )
        server.shutdown()
    assert (done.returncode, done.stdout) == (0, "1\n" * parts), done.stderr
    commands = [body["jobSpec"]["command"] for _, _, body in server.sent]
    assert [command[5:] for command in commands] == (
        [[]] if parts == 1 else [["--part", "1/2"], ["--part", "2/2"]]
    )
    (path, authorization, body), *_ = server.sent
    assert (path, authorization) == ("/api/scheduled-jobs/my-org", "Bearer hf_secret")
    assert body["schedule"] == "0 3 * * *"
    job = body["jobSpec"]
    assert job["command"][:3] == ["quarry", "extract", "/input/nightly.yaml"]
    assert job["flavor"] in {flavor.value for flavor in JobHardware}
    assert job["secrets"].keys() == {"QUARRY_HUB_TOKEN", "HF_TOKEN"}
    assert job["volumes"] == [
        {"type": "dataset", "source": "my-org/nightly", "mountPath": "/input", "readOnly": True}
    ]
