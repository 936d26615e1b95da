"""The commands of docs/ and README.md, their links, and the manifest hold for the repository as it is."""

import re
import shlex
from pathlib import Path

import tyro
import yaml

from layerwave.cli import Command
from layerwave.commands.calibrate import Calibrate
from layerwave.commands.jobs import read_jobs
from layerwave.commands.train import Train

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
TEXT = "".join(page.read_text() for page in PAGES)
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT.replace("\\\n", " "), re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True) for block in BLOCKS for line in re.findall(r"layerwave [a-z]+[^'\n]*", block)
]


def test_every_command_is_understood_and_there_is_one_for_every_launcher():
    parsed = [tyro.cli(Command, args=words[1:]) for words in COMMANDS]
    assert sum(isinstance(command, Train) and command.mesh is not None for command in parsed) == 1
    distributed = [command for command in parsed if isinstance(command, Calibrate) and command.processes.distributed]
    assert [command.processes.process for command in distributed] == [None, None, 0]  # TPU, Slurm and by hand


def test_the_job_file_is_one(tmp_path, monkeypatch):
    (text,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "calibration.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("sharegpt.json").touch()
    Path("jobs.yaml").write_text(text)
    first, second, third = read_jobs(Path("jobs.yaml"))
    assert (first.dtype, second.dtype, second.settings.rho, third.mesh) == ("bfloat16", "bfloat16", 1, "data=1,model=2")


def test_the_manifest_names_its_own_pods_and_flags_that_there_are():
    jobset = yaml.safe_load((DOCS / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = jobset["spec"]["replicatedJobs"]
    spec, name = job["template"]["spec"], jobset["metadata"]["name"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    (variable,) = container["env"]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == index
    words = container["command"]
    assert words[0] == "layerwave"
    assert f"--process=$({variable['name']})" in words
    command = tyro.cli(Command, args=[word.replace(f"$({variable['name']})", "3") for word in words[1:]])
    options = command.processes
    assert options.distributed
    assert options.process == 3
    assert options.processes == spec["completions"] == spec["parallelism"]
    assert spec["completionMode"] == "Indexed"
    # JobSet's host name of pod 0: <jobset>-<job>-<index of the job>-<index of the pod>.<jobset>
    (port,) = container["ports"]
    assert options.coordinator == f"{name}-{job['name']}-0-0.{name}:{port['containerPort']}"
    data, model = (int(part.split("=")[1]) for part in command.mesh.split(","))
    assert data * model == container["resources"]["limits"]["nvidia.com/gpu"]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert all(str(path).startswith(mounts[0]) for path in (command.target, command.conversations, command.out))
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0


def test_every_link_leads_to_a_file():
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())]
    assert len(links) > 10
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []
