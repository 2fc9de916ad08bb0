"""launch/gke.sh: the manifest, its pod's command, and what an image is made of."""

import fnmatch
import json
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml
from test_launch import BASH, REPOSITORY, Checkout

from bagrpo.plan import chips

KUBECTL = f"""#!{BASH}
printf '%s\\n' "$@" >"ROOT/called"
while IFS= read -r line; do printf '%s\\n' "$line"; done >"ROOT/applied"
"""
KINDS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
}
OPTIONS = ["--name", "math", "--type", "v5e-256", "--image", "host/image:1"]
COMMAND = ["--", "train", "configs/x.yaml", "folder=gs://bucket/run"]


@pytest.fixture
def checkout(tmp_path):
    checkout = Checkout(tmp_path)
    for name in ("gke.sh", "jobset.yaml"):
        shutil.copy(REPOSITORY / "launch" / name, checkout.root / "launch")
    checkout.add("kubectl", KUBECTL.replace("ROOT", str(checkout.root)))
    return checkout


def run(checkout, *arguments):
    return checkout.run(*arguments, script="launch/gke.sh")


def manifest(checkout, *arguments):
    status, out, err = run(checkout, "--dry-run", *arguments)
    assert (status, err) == (0, "")
    return yaml.safe_load(out)


def parts(jobset):
    """The replicated Job, its Job's spec, its pod's spec and its container."""
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    return replicated, job, pod, container


# Kubernetes 1.37's own schema of a Job (Apache-2.0), without descriptions, unknown fields refused.
SCHEMA = json.loads(Path(__file__).with_name("job_schema.json").read_text())


def validate(job):
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job}
    jsonschema.validate(whole, SCHEMA)


@pytest.mark.parametrize("claim", [[], ["--claim", "runs"]])
def test_its_job_has_the_form_of_one(checkout, claim):
    _, job, pod, _ = parts(manifest(checkout, *OPTIONS, *claim, *COMMAND))
    validate(job)
    pod["terminationGracePeriod"] = 600  # Strict: a field that there is not.
    with pytest.raises(jsonschema.ValidationError):
        validate(job)


def test_the_set_has_the_fields_of_its_kind(checkout):
    jobset = manifest(checkout, *OPTIONS, "--slices", "4", "--restarts", "7", *COMMAND)
    replicated, job, pod, container = parts(jobset)
    assert jobset == {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": "math",
            "annotations": {
                "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
            },
        },
        "spec": {
            "failurePolicy": {"maxRestarts": 7, "restartStrategy": "BlockingRecreate"},
            "replicatedJobs": [replicated],
        },
    }
    assert replicated == {"name": "slice", "replicas": 4, "template": {"spec": job}}
    assert job["backoffLimit"] == 0
    assert job["completionMode"] == "Indexed"
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == 600
    assert container["image"] == "host/image:1"


# https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
@pytest.mark.parametrize(
    ("name", "topology", "hosts", "each"),
    [
        ("v4-8", "2x2x1", 1, 4),
        ("v4-32", "2x2x4", 4, 4),
        ("v5e-1", "1x1", 1, 1),
        ("v5e-4", "2x2", 1, 4),
        ("v5e-8", "2x4", 1, 8),
        ("v5e-16", "4x4", 4, 4),
        ("v5e-256", "16x16", 64, 4),
        ("v5p-16", "2x2x2", 2, 4),
        ("v5p-1024", "8x8x8", 128, 4),
        ("v6e-8", "2x4", 1, 8),
        ("v6e-128", "8x16", 32, 4),
    ],
)
def test_a_slice_is_asked_for_as_the_cluster_has_it(checkout, name, topology, hosts, each):
    options = ["--name", "x", "--type", name, "--image", "i"]
    _, job, pod, container = parts(manifest(checkout, *options, *COMMAND))
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": KINDS[name.split("-")[0]],
        "cloud.google.com/gke-tpu-topology": topology,
    }
    assert job["parallelism"] == job["completions"] == hosts
    assert container["resources"] == {"limits": {"google.com/tpu": each}}


@pytest.mark.parametrize("kind", KINDS)
def test_slices_are_those_that_a_plan_knows(checkout, kind):
    assert set(KINDS) == set(chips.CHIPS)
    for count in [2**power for power in range(14)] + [3, 12, 384, 16384]:
        name = f"{kind}-{count}"
        try:
            shape = chips.parse(name).shape
        except ValueError:
            status, _, err = run(checkout, "--type", name, *OPTIONS[:2], "--image", "i", *COMMAND)
            assert status == 1, name
            assert err.startswith(f"launch/gke.sh: there is no slice {name}"), err
        else:
            options = ["--name", "x", "--type", name, "--image", "i"]
            _, job, pod, container = parts(manifest(checkout, *options, *COMMAND))
            topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
            assert topology == "x".join(map(str, shape)), name
            each = container["resources"]["limits"]["google.com/tpu"]
            assert job["completions"] * each == chips.parse(name).chips, name


def test_a_claim_is_mounted_where_runs_are_kept(checkout):
    _, _, pod, container = parts(manifest(checkout, *OPTIONS, "--claim", "my-runs", *COMMAND))
    (mount,) = container["volumeMounts"]
    assert mount["mountPath"] == "/bagrpo/runs"
    assert pod["volumes"] == [
        {"name": mount["name"], "persistentVolumeClaim": {"claimName": "my-runs"}}
    ]
    _, _, pod, _ = parts(manifest(checkout, *OPTIONS, *COMMAND))
    assert pod["volumes"] == [{"name": mount["name"], "emptyDir": {}}]


def test_arguments_reach_the_command_as_they_are_given(checkout):
    given = ['a "quoted" \\ & word', "line\nand\ttab", "${NAME}", "'", "# no comment", "", "a: {b}"]
    _, _, _, container = parts(manifest(checkout, *OPTIONS, "--", *given))
    assert container["args"] == given
    _, _, _, container = parts(manifest(checkout, *OPTIONS, "--", "$(HOME)", "$$(HOME)"))
    assert container["args"] == ["$$(HOME)", "$$$(HOME)"]  # Which Kubernetes turns back.


def test_a_run_that_ends_with_its_pods_is_said_so(checkout):
    status, _, err = run(checkout, "--dry-run", *OPTIONS, *COMMAND[:-1])
    assert status == 0
    assert err.startswith("launch/gke.sh: the run ends with its pods")
    assert run(checkout, "--dry-run", *OPTIONS, "--claim", "runs", *COMMAND[:-1])[2] == ""


def test_what_is_applied_is_what_a_dry_run_prints(checkout):
    status, _, err = run(checkout, *OPTIONS, *COMMAND)
    assert status == 0, err
    assert (checkout.root / "called").read_text().split() == ["apply", "--filename=-"]
    applied = (checkout.root / "applied").read_text()
    assert run(checkout, "--dry-run", *OPTIONS, *COMMAND)[1] == applied
    assert "kubectl logs --follow --selector=jobset.sigs.k8s.io/jobset-name=math," in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give the run a name: --name NAME"),
        ([*OPTIONS], "say what to run after --"),
        (["--name", "x", "--type", "v5e-4", *COMMAND], "give an image made with launch/Docker"),
        (["--name", "x", "--image", "i", *COMMAND], "--type '' is none of v4-N, v5e-N"),
        ([*OPTIONS, "--type", "h100-8", *COMMAND], "--type 'h100-8' is none of v4-N, v5e-N"),
        ([*OPTIONS, "--type", "v5e-", *COMMAND], "there is no slice v5e-"),
        ([*OPTIONS, "--type", "v5e-8", "--slices", "2", *COMMAND], "several slices need several"),
        ([*OPTIONS, "--name", "A_b", *COMMAND], "--name A_b should be of a-z"),
        ([*OPTIONS, "--slices", "0", *COMMAND], "--slices 0 should be a positive number"),
        ([*OPTIONS, "--claim", *COMMAND], "--claim needs a value"),
        ([*OPTIONS, "train"], "there is no option train"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_sentence(checkout, arguments, said):
    status, out, err = run(checkout, *arguments)
    assert (status, out) == (1, "")
    assert err.startswith(f"launch/gke.sh: {said}")
    assert err.count("\n") == 1
    assert not (checkout.root / "called").exists()


def test_help_needs_nothing(checkout):
    status, out, err = run(checkout, "--help")
    assert (status, err) == (0, "")
    assert "launch/gke.sh --name NAME --type TYPE --image IMAGE" in out


def test_an_image_lacks_nothing_that_is_committed():
    ignored = [
        pattern.removeprefix("**/")
        for pattern in (REPOSITORY / ".dockerignore").read_text().splitlines()
    ]
    listing = ["git", "-C", str(REPOSITORY), "ls-files"]
    files = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "launch/local.sh" in files
    for file in files:
        for part in file.split("/"):
            assert not any(fnmatch.fnmatch(part, pattern) for pattern in ignored), file


def test_an_image_starts_what_the_manifest_runs_in_the_folder_where_it_is():
    dockerfile = (REPOSITORY / "launch/Dockerfile").read_text()
    assert re.search(r"^WORKDIR /bagrpo\nCOPY \. \.$", dockerfile, re.MULTILINE)
    assert dockerfile.index("ENV ACCELERATOR=") < dockerfile.index("RUN launch/local.sh")
    assert 'ENTRYPOINT ["launch/local.sh"]' in dockerfile
    assert "mountPath: /bagrpo/runs" in (REPOSITORY / "launch/jobset.yaml").read_text()
