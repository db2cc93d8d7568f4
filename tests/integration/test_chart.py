"""What the Helm chart makes of values: objects that Kubernetes takes, commands that parse; nothing of what is wrong.

No cluster is here. Objects are checked against the schemas of Kubernetes' versions, and among each other.
"""

from __future__ import annotations

import json
import re
import tarfile
from base64 import b64decode
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.integration.test_deploy import known, parsed
from tools.helm import CHART, Made, Object, Refused, call, made
from unfuse import __version__
from unfuse.core.plan import TOGETHER
from unfuse.queues.address import parse_address
from unfuse.server.key_lines import Key
from unfuse.server.keys import Keys
from unfuse.service.machine_workers import LEAVING_S
from unfuse.wire.keys import read
from unfuse.worker.worker import LEAVE_S, SAVING

ROOT = Path(__file__).parents[2]
VERSIONS = ("1.30.0", "1.34.0", "1.37.0")
LEAST: Object = {"redis": {"trial": True}, "wireKeys": {"existingSecret": "wire"}}
KEYS = "secret " + "a" * 40 + "\npeer " + "b" * 40 + "\n"
SPLIT: Object = {
    "models": ["Wan-AI/Wan2.1-T2V-14B-Diffusers"],
    "scheduler": {"replicas": 3, "args": ["--order=fair"], "env": [{"name": "AWS_REGION", "value": "eu-1"}]},
    "queue": {"existingSecret": "redis"},
    "results": {"url": "s3://pictures/here"},
    "wireKeys": {"scheduler": KEYS, "worker": KEYS},
    "apiKeys": {"lines": ["anna 0123456789abcdef rate=60/min"]},
    "modelCache": {"existingClaim": "models", "hubSecret": "hub"},
    "imagePullSecrets": [{"name": "registry"}],
    "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"name": "web"}}}]},
    "workers": [
        {
            "name": "encoder", "role": "encoder", "components": ["text_encoder"], "replicas": 2,
            "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "16Gi"}},
        },
        {
            "name": "dit", "role": "denoiser", "replicas": 4, "stepSeconds": 30, "sharedMemory": "16Gi",
            "args": ["--parallel=denoiser=ulysses:8"],
            "resources": {"limits": {"nvidia.com/gpu": 8, "memory": "320Gi"}},
            "autoscaling": {"min": 0, "max": 10, "seconds": 60, "coldStartSeconds": 600},
            "nodeSelector": {"gpu": "h100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "runtimeClassName": "nvidia", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
            "envFrom": [{"secretRef": {"name": "s3"}}], "podAnnotations": {"a": "b"},
        },
        {"name": "vae", "role": "decoder", "replicas": 2, "drainSeconds": 60},
        {"name": "text", "role": "language+vision", "replicas": 0, "autoscaling": {"min": 1, "max": 2, "seconds": 0.5}},
    ],
}  # fmt: skip
BY_HPA = SPLIT | {
    "autoscaling": {"by": "hpa"},
    "workers": [worker | ({"autoscaling": {"min": 1, "max": 4, "seconds": 60}}) for worker in SPLIT["workers"]],
    "redis": {"trial": False},
}
POOL: Object = {"name": "x", "role": "all", "replicas": 1}
TO_ZERO = {"min": 0, "max": 2, "seconds": 1}
ASKED = {"min": 1, "max": 2, "seconds": 1, "query": "up"}
NONE: Object = {}
CASES = {"none": NONE, "least": LEAST, "split": SPLIT, "hpa": BY_HPA}


@cache
def chart(case: str, plain: bool = False) -> Made:
    return made(CASES[case], apis=set()) if plain else made(CASES[case])


def notes(values: Object) -> str:
    """What Helm prints behind an installation in a cluster that knows Kubernetes' own kinds alone."""
    told = call("install", "u", str(CHART), "--dry-run=client", "--output", "json", values=values)
    return str(json.loads(told)["info"]["notes"])


UNITS = {"m": 1e-3, "": 1.0, "mb": 2.0**20, "Mi": 2.0**20, "Gi": 2.0**30}


def amount(text: str) -> float:
    """An amount as Kubernetes or Redis reads it, in bytes or CPUs."""
    number, unit = re.fullmatch(r"([\d.]+)(\w*)", text).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


def containers(pod: Object) -> list[Object]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


@pytest.fixture(params=CASES)
def objects(request: pytest.FixtureRequest) -> Made:
    return chart(request.param)


@pytest.mark.parametrize("case", CASES)
def test_helm_finds_nothing_wrong(case: str) -> None:
    assert "0 chart(s) failed" in call("lint", str(CHART), "--strict", values=CASES[case])


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_the_objects(objects: Made, version: str) -> None:
    """Those of its own kinds. Of other kinds there are no schemas here; see below for what they ask."""
    for one in objects.objects:
        if not one["apiVersion"].startswith(("monitoring.", "keda.")):
            kubernetes_validate.validate(one, version, strict=True)


def test_an_object_that_kubernetes_does_not_take_is_noticed() -> None:
    (service, *_) = chart("least").of("Service").values()
    for wrong in ({"prots": []}, {"ports": [{"port": "eighty"}]}):
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(service | {"spec": wrong}, "1.37.0", strict=True)


def test_what_a_cluster_does_not_know_is_left_out() -> None:
    """Then nothing scales the pool: it has its replicas, and the notes say so."""
    foreign = {"ScaledObject", "ServiceMonitor", "PrometheusRule"}
    assert chart("split").kinds() >= foreign and not chart("split", plain=True).kinds() & foreign
    assert chart("split", plain=True).of("StatefulSet")["u-dit"]["spec"]["replicas"] == 4
    assert "replicas" not in chart("split").of("StatefulSet")["u-dit"]["spec"]
    told = notes(SPLIT)
    assert "Nothing scales u-dit: that takes KEDA" in told and "no Prometheus operator" in told


def test_versions_are_those_of_unfuse() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == __version__


def test_commands_parse_and_variables_are_settings(objects: Made) -> None:
    (settings,) = (one["data"] for name, one in objects.of("ConfigMap").items() if name == "u")
    assert known([*settings])
    for pod in objects.pods().values():
        for container in pod["spec"]["containers"]:
            assert known([variable["name"] for variable in container.get("env", [])])
            if container["name"] != "redis":
                parsed(container["args"])


def test_pods_may_do_little(objects: Made) -> None:
    """And none has variables of Services: UNFUSE_PORT, of one that is named unfuse, would be refused as no setting."""
    for pod in objects.pods().values():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
        secure = spec["securityContext"]
        assert (secure["runAsNonRoot"], secure["runAsUser"], secure["fsGroup"]) == (True, 10001, 10001)
        assert secure["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(pod):
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
            assert own["capabilities"] == {"drop": ["ALL"]}
    for account in objects.of("ServiceAccount").values():
        assert account["automountServiceAccountToken"] is False
    assert not objects.kinds() & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}


def test_everything_that_is_named_is_there(objects: Made) -> None:
    """Volumes, ports, claims, Secrets and ConfigMaps, but for those that values say exist; and who is selected."""
    given = {"wire", "redis", "hub", "s3", "models", "registry"}
    there = {name for kind in ("Secret", "ConfigMap", "PersistentVolumeClaim") for name in objects.of(kind)} | given
    for pod in objects.pods().values():
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
        named = set(re.findall(r"'(?:secretName|claimName)': '([^']*)'", str(pod)))
        refs = r"'(?:configMapRef|secretKeyRef|secretRef)': {'(?:key': '\w+', ')?name': '([^']*)'"
        named |= set(re.findall(refs, str(pod)))
        assert named <= there
        for container in containers(pod):
            claimed = {"data"} if container["name"] == "redis" else set()
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes | claimed
            ports = {port["name"] for port in container.get("ports", [])}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert {ask["port"] for ask in container.get(probe, {}).values() if isinstance(ask, dict)} <= ports
    labels = {name: pod["metadata"]["labels"] for name, pod in objects.pods().items()}

    def selected(by: dict[str, str]) -> set[str]:
        return {name for name, own in labels.items() if by.items() <= own.items()}

    for name, service in objects.of("Service").items():
        assert selected(service["spec"]["selector"]), name
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        for name, one in objects.of(kind).items():
            by = one["spec"].get("selector") or one["spec"]["podSelector"]
            assert selected(by["matchLabels"]), name
    for name, one in (objects.of("Deployment") | objects.of("StatefulSet")).items():
        assert selected(one["spec"]["selector"]["matchLabels"]) == {name}


def test_a_worker_has_the_time_to_save_a_step_that_runs() -> None:
    """A drain keeps a quarter of its time for saving, and for that the step in progress has to end."""
    sets = chart("split").of("StatefulSet")
    for name, drain in {"u-encoder": 20, "u-dit": 120, "u-vae": 60}.items():
        pod = sets[name]["spec"]["template"]["spec"]
        assert f"--drain-timeout={drain}" in pod["containers"][0]["args"]
        assert pod["terminationGracePeriodSeconds"] == drain + 10
    assert SAVING * 120 >= 30 and LEAVE_S + 3 * LEAVE_S < 10 == LEAVING_S


def test_dashboards_and_alerts_are_those_of_deploy() -> None:
    """The chart links to them, so what is packaged is equal; as a PrometheusRule they are the same groups."""
    rules = (ROOT / "deploy/prometheus/alerts.yml").read_text()
    boards = {path.name: path.read_text() for path in (ROOT / "deploy/grafana/dashboards").glob("*.json")}
    maps = chart("least").of("ConfigMap")
    assert maps["u-alerts"]["data"] == {"alerts.yml": rules} and maps["u-dashboards"]["data"] == boards
    assert chart("least").of("PrometheusRule")["u"]["spec"] == yaml.safe_load(rules)


def test_prometheus_finds_the_gateway_under_the_name_that_alerts_ask_for() -> None:
    monitor = chart("least").of("ServiceMonitor")["u"]["spec"]
    (service,) = (
        one for one in chart("least").of("Service").values()
        if monitor["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()
    )  # fmt: skip
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "unfuse"
    assert 'job="unfuse"' in (ROOT / "deploy/prometheus/alerts.yml").read_text()
    assert [port["name"] for port in service["spec"]["ports"]] == [monitor["endpoints"][0]["port"]]
    assert monitor["endpoints"][0]["authorization"]["credentials"] == {"name": "u-api", "key": "metrics"}


def test_a_pool_is_scaled_by_the_work_of_its_roles() -> None:
    keda = {name: one["spec"] for name, one in chart("split").of("ScaledObject").items()}
    (dit,) = keda["u-dit"]["triggers"]
    assert keda["u-dit"]["minReplicaCount"] == 0
    assert dit["metadata"]["query"] == (
        "sum(max by (role, component) (unfuse_role_predicted_seconds"
        '{namespace="default",service="u",role=~"denoiser"}))'
    )
    texts = "|".join((*TOGETHER["language"], "vision"))
    assert f'role=~"{texts}"' in keda["u-text"]["triggers"][0]["metadata"]["query"]
    assert keda["u-text"]["triggers"][0]["metadata"]["threshold"] == "0.5"
    assert sorted(chart("hpa").of("HorizontalPodAutoscaler")) == ["u-dit", "u-encoder", "u-text", "u-vae"]
    (metric,) = chart("hpa").of("HorizontalPodAutoscaler")["u-encoder"]["spec"]["metrics"]
    assert metric["external"]["metric"]["selector"]["matchExpressions"] == [
        {"key": "role", "operator": "In", "values": ["encoder"]},
        {"key": "component", "operator": "In", "values": ["text_encoder"]},
    ]
    for scaled in (*keda, *chart("hpa").of("HorizontalPodAutoscaler")):
        assert scaled in chart("split").of("StatefulSet")


def test_components_come_from_where_values_say() -> None:
    """Schedulers are told; workers hear of it from them."""
    sources = {"vae": "owner/vae", "text_encoder_2": "/models/t5 xxl"}
    objects = made(LEAST | {"componentSources": sources})
    (scheduler,) = objects.pods()["u-scheduler"]["spec"]["containers"]
    found = [flag for flag in scheduler["args"] if "component-source" in flag]
    assert found == ["--component-source=text_encoder_2=/models/t5 xxl", "--component-source=vae=owner/vae"]
    parsed(scheduler["args"])


@pytest.mark.parametrize(
    ("pool", "said"),
    [
        ({"resources": {"limits": {"nvidia.com/gpu": 8}}}, ["--parallel=auto"]),
        ({"resources": {"requests": {"amd.com/gpu": "2"}}}, ["--parallel=auto"]),
        ({"resources": {"limits": {"nvidia.com/gpu": 1, "cpu": 8}}}, []),
        ({}, []),
        ({"resources": {"limits": {"nvidia.com/gpu": 8}}, "parallel": "denoiser=ulysses:4+cfg:2"},
         ["--parallel=denoiser=ulysses:4+cfg:2"]),
        ({"resources": {"limits": {"nvidia.com/gpu": 8}}, "args": ["--parallel=denoiser=ring:8"]},
         ["--parallel=denoiser=ring:8"]),
        ({"resources": {"limits": {"nvidia.com/gpu": 8}}, "args": ["--device=cuda:0"]}, []),
    ],
)  # fmt: skip
def test_a_pod_of_several_gpus_has_a_rank_on_each_unless_it_says_otherwise(pool: Object, said: list[str]) -> None:
    (worker,) = made(LEAST | {"workers": [POOL | pool]}).pods()["u-x"]["spec"]["containers"]
    assert [flag for flag in worker["args"] if "parallel" in flag] == said
    parsed(worker["args"])


def test_a_pool_is_scaled_by_the_tasks_that_wait_for_its_roles_alone() -> None:
    """By either autoscaler: what waits for other pools of the service is none of its own."""
    pool = POOL | {"role": "denoiser", "autoscaling": {"min": 1, "max": 9, "tasks": 4}}
    (trigger,) = made(LEAST | {"workers": [pool]}).of("ScaledObject")["u-x"]["spec"]["triggers"]
    assert trigger["metadata"]["query"] == (
        'sum(max by (role, component) (unfuse_role_queue_size{namespace="default",service="u",role=~"denoiser"}))'
    )
    assert trigger["metadata"]["threshold"] == "4"
    scaled = made(LEAST | {"workers": [pool], "autoscaling": {"by": "hpa"}}).of("HorizontalPodAutoscaler")["u-x"]
    (metric,) = scaled["spec"]["metrics"]
    assert metric["external"] == {
        "metric": {
            "name": "unfuse_role_queue_size",
            "selector": {
                "matchLabels": {"service": "u"},
                "matchExpressions": [{"key": "role", "operator": "In", "values": ["denoiser"]}],
            },
        },
        "target": {"type": "AverageValue", "averageValue": "4"},
    }
    kubernetes_validate.validate(scaled, "1.37.0", strict=True)


def test_nobody_is_taken_away_sooner_than_a_cold_start_takes() -> None:
    """What is said of it, else five minutes; a horizontal autoscaler waits for an hour at the most."""
    own = chart("split").of("ScaledObject")
    keda = {name: one["spec"] for name, one in own.items()}
    behaviors = {name: one["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] for name, one in keda.items()}
    hpa = [one["spec"]["behavior"] for one in chart("hpa").of("HorizontalPodAutoscaler").values()]
    slow = TO_ZERO | {"coldStartSeconds": 7200}
    (hours,) = made(LEAST | {"workers": [POOL | {"autoscaling": slow}]}).of("ScaledObject").values()
    behaviors["hours"] = hours["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    windows = {name: one["scaleDown"]["stabilizationWindowSeconds"] for name, one in behaviors.items()}
    assert windows == {"u-dit": 600, "u-text": 300, "hours": 3600}
    assert [one["scaleDown"]["stabilizationWindowSeconds"] for one in hpa] == [300] * 4
    cooled = [one["cooldownPeriod"] for one in (keda["u-dit"], keda["u-text"], hours["spec"])]
    assert cooled == [600, 300, 7200]


def test_a_pool_that_may_sleep_is_said_to_and_deadlines_wait_for_two_cold_starts() -> None:
    """The server's own flags come last, and so go before what is worked out here."""
    split, hpa, other = (
        next(iter(objects.of("Deployment").values()))["spec"]["template"]["spec"]["containers"][0]["args"]
        for objects in (chart("split"), chart("hpa"), made(LEAST | {"workers": [POOL | {"autoscaling": TO_ZERO}]}))
    )
    assert split[-3:] == ["--asleep=denoiser=2", "--wake-limit=1200", "--order=fair"]
    assert not [flag for flag in hpa if "asleep" in flag or "wake" in flag]
    assert other[-2:] == ["--asleep=all=2", "--wake-limit=600"]


def test_a_pool_may_be_scaled_by_another_question() -> None:
    query = 'sum(max by (pool) (unfuse_queue_size{namespace="a"}))'
    pool = POOL | {"autoscaling": TO_ZERO | {"query": query, "seconds": 1000000}}
    (trigger,) = made(LEAST | {"workers": [pool]}).of("ScaledObject")["u-x"]["spec"]["triggers"]
    assert trigger["metadata"]["query"] == query and float(trigger["metadata"]["threshold"]) == 1e6


def test_large_numbers_are_written_as_such() -> None:
    """As some clusters give each namespace uids of its own."""
    for pod in made(LEAST | {"uid": 1000650000}).pods().values():
        uid = pod["spec"]["securityContext"]["runAsUser"]
        assert uid == 1000650000 and isinstance(uid, int), "1.00065e+09 is no whole number to Kubernetes"


def test_what_is_packaged_has_the_files_that_the_chart_links_to(tmp_path: Path) -> None:
    call("package", str(CHART), "--destination", str(tmp_path))
    with tarfile.open(tmp_path / f"unfuse-{__version__}.tgz") as packed:
        for inside, there in {
            "files/alerts.yml": "prometheus/alerts.yml",
            "files/dashboards/unfuse.json": "grafana/dashboards/unfuse.json",
        }.items():
            found = packed.extractfile(f"unfuse/{inside}")
            assert found and found.read() == (ROOT / "deploy" / there).read_bytes()


NASTY = 'it\'s "quoted"\n- {{ .Values.uid }}\n---\nkind: Pod #: &a *b %s \\ \t日本'


def test_values_stay_values_whatever_is_in_them() -> None:
    values: Object = LEAST | {
        "models": [NASTY],
        "scheduler": {"args": [NASTY], "env": [{"name": "A", "value": NASTY}], "podAnnotations": {"a": NASTY}},
        "service": {"annotations": {"b": NASTY}},
        "redis": {"trial": True, "image": NASTY},
        "monitoring": {"labels": {"c": NASTY}},
        "workers": [{"name": "x", "role": "all", "replicas": 1, "models": [NASTY], "args": [NASTY]}],
    }
    objects = made(values)
    assert objects.kinds() == chart("least").kinds() and len(objects.objects) == len(chart("least").objects)
    (scheduler,) = objects.of("Deployment")["u-scheduler"]["spec"]["template"]["spec"]["containers"]
    assert scheduler["args"][1] == scheduler["args"][-1] == NASTY
    assert {"name": "A", "value": NASTY} in scheduler["env"]
    (worker,) = objects.of("StatefulSet")["u-x"]["spec"]["template"]["spec"]["containers"]
    assert f"--model={NASTY}" in worker["args"] and worker["args"][-1] == NASTY
    assert objects.of("StatefulSet")["u-redis"]["spec"]["template"]["spec"]["containers"][0]["image"] == NASTY
    assert objects.of("Service")["u"]["metadata"]["annotations"] == {"b": NASTY}
    assert objects.of("ServiceMonitor")["u"]["metadata"]["labels"]["c"] == NASTY
    assert objects.of("Pod")["u-picture"]["spec"]["containers"][0]["args"][2] == f"--model={NASTY}"


@pytest.mark.parametrize("release", ["a" * 53, "r" * 40 + "-1", "x.y" + "z" * 30])
def test_names_are_short_enough_for_everything_that_is_made_of_them(release: str) -> None:
    """A pod of a StatefulSet has a label of its name and eleven characters more. Releases stay apart."""
    name = "p" * 20
    values = LEAST | {"workers": [{"name": name, "role": "all", "replicas": 1}]}
    names = {one["metadata"]["name"] for one in made(values, release=release).objects}
    assert max(map(len, names)) <= 52 and any(one.endswith(name) for one in names)
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", one) for one in names)
    assert len(call("template", release, str(CHART), values=values)) > 0
    assert names.isdisjoint(one["metadata"]["name"] for one in made(values, release=release[:-1] + "0").objects)


@pytest.mark.parametrize("release", ["on", "no", "true", "null"])
def test_a_release_may_have_a_name_that_yaml_reads_as_something_else(release: str) -> None:
    names = [one["metadata"]["name"] for one in made(LEAST, release=release).objects]
    assert {type(name) for name in names} == {str} and release in names


def test_amounts_are_words_as_a_server_takes_them() -> None:
    """Kubernetes' schemas have both; a server that is to apply a number, as Helm 4 asks it to, expects a string."""
    amounts = {"limits": {"nvidia.com/gpu": 8, "memory": "16Gi"}, "requests": {"cpu": 0.5, "memory": 2**37}}
    amounts |= {"claims": [{"name": "c"}]}
    objects = made(LEAST | {"scheduler": {"resources": amounts}, "workers": [POOL | {"resources": amounts}]})
    for name in ("u-x", "u-scheduler"):
        found = objects.pods()[name]["spec"]["containers"][0]["resources"]
        assert (found["limits"], found["claims"]) == ({"nvidia.com/gpu": "8", "memory": "16Gi"}, amounts["claims"])
        assert found["requests"] == {"cpu": "0.5", "memory": "137438953472"}


def test_components_that_look_like_numbers_stay_words() -> None:
    """A label's values are words to Kubernetes, which refuses the whole object otherwise."""
    pool = POOL | {"role": "encoder", "components": ["1", "true"], "autoscaling": {"min": 1, "max": 2, "seconds": 1}}
    (scaled,) = made(LEAST | {"workers": [pool], "autoscaling": {"by": "hpa"}}).of("HorizontalPodAutoscaler").values()
    (metric,) = scaled["spec"]["metrics"]
    said = {one["key"]: one["values"] for one in metric["external"]["metric"]["selector"]["matchExpressions"]}
    assert said == {"role": ["encoder"], "component": ["1", "true"]}


def test_workers_may_change_roles_and_are_scaled_by_the_work_of_all_of_them() -> None:
    objects = made(LEAST | {"workers": [POOL | {"role": "encoder,denoiser", "autoscaling": TO_ZERO}]})
    (trigger,) = objects.of("ScaledObject")["u-x"]["spec"]["triggers"]
    assert 'role=~"encoder|denoiser"' in trigger["metadata"]["query"]
    scheduler, worker = (objects.pods()[name]["spec"]["containers"][0]["args"] for name in ("u-scheduler", "u-x"))
    assert "--asleep=encoder,denoiser=2" in scheduler and "--role=encoder,denoiser" in worker


@pytest.mark.parametrize(
    "url",
    [
        "redis://a,b/0?shards=4", "redis+sentinel://a:1,b/one,two?shards=2&replicas=1", "redis+cluster://a,b?shards=8",
        "rediss+cluster://a:7000",
    ],
)  # fmt: skip
def test_tasks_may_wait_wherever_a_server_takes_them_to(url: str) -> None:
    parse_address(url)
    objects = made(LEAST | {"redis": {"trial": False}, "queue": {"url": url}})
    (scheduler,) = objects.pods()["u-scheduler"]["spec"]["containers"]
    assert {"name": "UNFUSE_SERVE__QUEUE", "value": url} in scheduler["env"]


def without(*path: str) -> dict[str, Any]:
    """The least values, with something at that path that is not known."""
    values = json.loads(json.dumps(LEAST))
    place = values
    for name in path:
        place = place.setdefault(name, {})
    place["colour"] = "red"
    return dict(values)


PLACES = [
    (name,)
    for name, value in yaml.safe_load((CHART / "values.yaml").read_text()).items()
    if isinstance(value, dict) and name != "componentSources"  # whose names people choose
]


@pytest.mark.parametrize("place", [(), *PLACES], ids=".".join)
def test_what_is_unknown_is_refused(place: tuple[str, ...]) -> None:
    with pytest.raises(Refused, match="additional properties 'colour' not allowed"):
        made(without(*place))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"workers": [POOL | {"replica": 1}]}, "additional properties 'replica'"),
        ({"workers": [POOL | {"name": "x" * 21}]}, "does not match pattern"),
        ({"workers": [POOL | {"name": "X y"}]}, "does not match pattern"),
        ({"workers": [POOL | {"replicas": "1"}]}, "got string, want integer"),
        ({"workers": [POOL | {"replicas": -1}]}, "minimum"),
        ({"workers": [POOL | {"parallel": "ulysses:8"}]}, "does not match pattern"),
        ({"workers": [{"name": "x", "role": "all"}]}, "missing property 'replicas'"),
        ({"workers": [POOL, POOL]}, "two pools are named x"),
        ({"workers": [POOL | {"name": "scheduler"}]}, "no pool may be named scheduler"),
        ({"workers": [POOL | {"autoscaling": {"min": 3, "max": 2, "seconds": 1}}]}, "autoscaling.max is below"),
        ({"workers": [POOL | {"autoscaling": {"min": 1, "max": 2}}]}, "autoscaling needs one of seconds"),
        ({"workers": [POOL | {"autoscaling": TO_ZERO | {"tasks": 1}}]}, "autoscaling needs one of seconds"),
        ({"workers": [POOL | {"autoscaling": {"min": 1, "max": 2, "tasks": 0}}]}, "minimum"),
        ({"workers": [POOL | {"autoscaling": TO_ZERO}], "autoscaling": {"by": "hpa"}}, "at least one"),
        ({"workers": [POOL | {"autoscaling": ASKED}], "autoscaling": {"by": "hpa"}}, "for KEDA"),
        ({"queue": {"url": "redis://r:6379/0", "existingSecret": "r"}}, "where tasks wait is said once"),
        ({"redis": {"trial": False}}, "tasks have no place to wait"),
        ({"queue": {"url": "redis://me:pass@r:6379/0"}, "redis": {"trial": False}}, "queue"),
        ({"queue": {"url": "memory"}, "redis": {"trial": False}}, "queue"),
        ({"results": {"url": "disk:/here"}}, "results"),
        ({"wireKeys": {"existingSecret": "", "worker": KEYS}}, "unfuse keys new keys"),
        ({"wireKeys": {"existingSecret": "", "scheduler": KEYS}}, "unfuse keys new keys"),
        ({"serving": {"enabled": False}}, "nothing would be installed"),
        ({"operator": {"namespaces": ["A b"]}}, "does not match pattern"),
        ({"wireKeys": {"existingSecret": "", "scheduler": "secret x", "worker": "y"}}, "wireKeys"),
        ({"apiKeys": {"lines": ["anna one two\nroot x admin=yes"]}}, "does not match pattern"),
        ({"fullnameOverride": "Name"}, "fullnameOverride"),
        ({"image": {"tag": "a b"}}, "does not match pattern"),
        ({"models": []}, "minItems"),
        ({"models": ["a", "b"], "componentSources": {"vae": "c"}}, "componentSources are of one model"),
        ({"componentSources": {"a b": "c"}}, "additional properties 'a b' not allowed"),
        ({"componentSources": {"vae": "a#b"}}, "does not match pattern"),
        ({"models": ["--port=1"]}, "does not match pattern"),
        ({"uid": 0}, "minimum"),
        ({"uid": None}, "uid"),
        ({"service": {"port": 70000}}, "maximum"),
        ({"disruption": {"maxUnavailable": "half"}}, "disruption"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_its_place(values: Object, says: str) -> None:
    with pytest.raises(Refused, match=re.escape(says)):
        made(LEAST | values)


def test_a_name_of_which_no_service_can_be_made_is_refused() -> None:
    with pytest.raises(Refused, match="begins with a letter, and 2024 does not: set fullnameOverride"):
        made(LEAST, release="2024")
    assert made(LEAST | {"fullnameOverride": "pictures"}, release="2024").of("Service")["pictures"]


def test_keys_of_an_installation_are_in_its_secrets(tmp_path: Path) -> None:
    """And one for `helm test` and one for Prometheus, whose hashes are the last lines; neither has a newline inside."""
    secrets = {name: {key: b64decode(text).decode() for key, text in one["data"].items()}
               for name, one in chart("split").of("Secret").items()}  # fmt: skip
    assert secrets["u-wire"] == {"scheduler.key": KEYS, "worker.key": KEYS}
    first, *_, end = secrets["u-api"]["keys"].split("\n")
    assert (first, end) == (SPLIT["apiKeys"]["lines"][0], "")
    (tmp_path / "keys").write_text(secrets["u-api"]["keys"])
    keys = Keys(files=[str(tmp_path / "keys")])
    assert keys.of(secrets["u-api"]["key"]) == Key("chart", admin=True)
    assert keys.of(secrets["u-api"]["metrics"]) == Key("prometheus", only_reads=True)
    for name in ("key", "metrics"):
        assert re.fullmatch(r"[A-Za-z0-9]{40}", secrets["u-api"][name])
    assert {*chart("least").of("Secret")} == {"u-api"}


def test_without_values_tasks_and_results_have_a_place_and_pods_know_each_other(tmp_path: Path) -> None:
    """One secret for both sides, in the file that `unfuse` derives the keys of each from; no claim that needs a class
    of volumes which many pods write to."""
    objects = chart("none")
    settings = objects.of("ConfigMap")["u"]["data"]
    assert settings["UNFUSE_SERVE__RESULTS"] == "redis://u-redis:6379/1"
    assert settings["UNFUSE_SERVE__RESULTS_LIMIT"] == "256MiB"
    (scheduler,) = objects.pods()["u-scheduler"]["spec"]["containers"]
    assert {"name": "UNFUSE_SERVE__QUEUE", "value": "redis://u-redis:6379/0"} in scheduler["env"]
    assert not objects.of("PersistentVolumeClaim")
    shared = tmp_path / "shared.key"
    shared.touch(0o600)
    shared.write_bytes(b64decode(objects.of("Secret")["u-wire"]["data"]["shared.key"]))
    for name in ("u-scheduler", "u-all"):
        (keys,) = objects.pods()[name]["spec"]["initContainers"]
        assert keys["command"] == ["install", "-m", "600", "/wire/shared.key", "/keys/"]
    assert read(str(tmp_path), "scheduler") and read(str(tmp_path), "worker")
    let_in = objects.of("NetworkPolicy")["u-redis"]["spec"]["ingress"][0]["from"]
    sides = {one["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for one in let_in}
    assert sides == {"scheduler", "worker"}, "workers write results"


def test_what_is_for_trying_alone_is_said_after_an_installation_without_values() -> None:
    warnings = ("Its Redis is for trying", "Results are in that Redis too", "Schedulers and workers share one secret")
    assert all(warning in notes(NONE) for warning in warnings)
    assert not any(warning in notes(SPLIT) for warning in warnings)


def test_the_notes_tell_how_to_make_an_image_that_is_in_no_registry() -> None:
    """As the Dockerfile has it, under the name by which the pods ask for it."""
    build = f"docker build -f deploy/docker/cpu.Dockerfile -t unfuse:{__version__} ."
    assert f"  {build}\n" in notes(NONE)
    assert (ROOT / "deploy/docker/cpu.Dockerfile").read_text().partition("\n")[0].endswith(f"  {build}")
    assert chart("none").pods()["u-all"]["spec"]["containers"][0]["image"] == f"unfuse:{__version__}"
    assert "docker build" not in notes({"image": {"repository": "registry.example/unfuse"}})


def test_pods_of_an_installation_without_values_find_room_in_a_small_cluster() -> None:
    """minikube has two CPUs and 4 GiB if it is told nothing, of which its own pods ask for 0.75 and 0.2."""
    objects = chart("none")
    asked = [
        (one["spec"]["replicas"], container["resources"]["requests"])
        for one in (*objects.of("Deployment").values(), *objects.of("StatefulSet").values())
        for container in one["spec"]["template"]["spec"]["containers"]
    ]
    assert len(asked) == 3
    assert sum(replicas * amount(requests["cpu"]) for replicas, requests in asked) <= 1.1
    assert sum(replicas * amount(requests["memory"]) for replicas, requests in asked) <= 2.2 * UNITS["Gi"]


def test_the_redis_for_trying_refuses_what_its_pod_has_no_room_for() -> None:
    """In memory, also while it writes its file anew, and on its disk, where the old file then is beside the new."""
    spec = chart("none").of("StatefulSet")["u-redis"]["spec"]
    (redis,), (claim,) = spec["template"]["spec"]["containers"], spec["volumeClaimTemplates"]
    flags = dict(zip(redis["args"][1::2], redis["args"][2::2], strict=True))
    assert (flags["--appendonly"], flags["--save"], flags["--maxmemory-policy"]) == ("yes", "", "noeviction")
    most = amount(flags["--maxmemory"])
    assert 2 * amount("256Mi") < most < 0.75 * amount(redis["resources"]["limits"]["memory"])
    assert 3 * most < amount(claim["spec"]["resources"]["requests"]["storage"])


def test_every_pod_may_take_its_image_from_a_registry_with_a_password() -> None:
    secrets = [{"name": "registry"}]
    pods = made({"imagePullSecrets": secrets, "operator": {"enabled": True}}).pods()
    assert {*pods} == {"u-scheduler", "u-all", "u-redis", "u-picture", "u-operator"}
    assert [pod["spec"].get("imagePullSecrets") for pod in pods.values()] == [secrets] * 5


@pytest.mark.parametrize(
    ("values", "place", "limit", "claims"),
    [
        ({"results": {"size": "1Gi"}}, "disk:/results", "0", {"u-results"}),
        ({"results": {"existingClaim": "mine", "limit": "1GB"}}, "disk:/results", "1GB", set()),
        ({"queue": {"url": "redis://r:6379/0"}}, "disk:/results", "0", {"u-results"}),
        ({"results": {"url": "s3://b/p"}}, "s3://b/p", "0", set()),
    ],
)
def test_results_are_where_values_say(values: Object, place: str, limit: str, claims: set[str]) -> None:
    objects = made(values)
    settings = objects.of("ConfigMap")["u"]["data"]
    assert (settings["UNFUSE_SERVE__RESULTS"], settings["UNFUSE_SERVE__RESULTS_LIMIT"]) == (place, limit)
    assert {*objects.of("PersistentVolumeClaim")} == claims
    assert ("u-redis" in objects.of("StatefulSet")) == ("queue" not in values)


def test_definitions_are_in_the_chart_and_are_those_of_deploy(tmp_path: Path) -> None:
    """Helm makes them before anything else; what is packaged has them too."""
    defined = {path.name: path.read_bytes() for path in (ROOT / "deploy/kubernetes/crds").iterdir()}
    shown = [one for one in yaml.safe_load_all(call("show", "crds", str(CHART))) if one]
    assert {one["metadata"]["name"] for one in shown} == {
        "diffusionpipelines.unfuse.dev", "diffusionpools.unfuse.dev", "clusterkopfpeerings.kopf.dev",
    }  # fmt: skip
    call("package", str(CHART), "--destination", str(tmp_path))
    with tarfile.open(tmp_path / f"unfuse-{__version__}.tgz") as packed:
        inside = {name: packed.extractfile(f"unfuse/crds/{name}") for name in defined}
        assert {name: file.read() for name, file in inside.items() if file} == defined


def test_the_operator_alone_is_installed_where_nothing_else_is_asked_for() -> None:
    assert not chart("none").kinds() & {"ClusterRole", "ClusterRoleBinding"}
    alone = made({"operator": {"enabled": True}, "serving": {"enabled": False}})
    assert alone.kinds() == {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Deployment"}
    both = made({"operator": {"enabled": True}})
    assert both.kinds() == chart("none").kinds() | alone.kinds()
