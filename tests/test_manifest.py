"""The manifest says what DESIGN.md allows and nothing else; every fault is named with its place and a way out."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from segcal.errors import ManifestError, MissingFileError, UsageError
from segcal.manifest import Manifest
from segcal.manifest_text import key_path
from segcal.yaml_file import LIMIT_BYTES, LIMIT_DEPTH

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "data_manifests").glob("*.yaml"))


def content(n_cases: int = 3, n_members: int = 2, **changes: Any) -> dict[str, Any]:
    """A small valid manifest as a dict; `changes` replace top-level keys, None takes one out."""
    cases = [
        {
            "id": f"case_{i}",
            "members": [f"member_{m}/case_{i}.npz" for m in range(n_members)],
            "label": f"labels/case_{i}.nii.gz",
        }
        for i in range(n_cases)
    ]
    whole = {"version": 1, "name": "small", "kind": "logits", "classes": ["background", "organ"], "cases": cases}
    return {key: value for key, value in (whole | changes).items() if value is not None}


def load(tmp_path: Path, data: object) -> Manifest:
    path = tmp_path / "manifest.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return Manifest.load(path)


def refusal(tmp_path: Path, data: object) -> str:
    with pytest.raises(ManifestError) as caught:
        load(tmp_path, data)
    assert str(tmp_path / "manifest.yaml") in str(caught.value)
    return str(caught.value)


def test_a_case_may_say_where_the_network_predicted(tmp_path: Path) -> None:
    data = content()
    data["cases"][1]["crop"] = [[1, 3], [0, 5], [2, 6]]
    manifest = load(tmp_path, data)
    assert [case.crop for case in manifest.cases] == [None, ((1, 3), (0, 5), (2, 6)), None]
    assert manifest.save(tmp_path / "again.yaml").sha256 == manifest.sha256 != load(tmp_path, content()).sha256

    for wrong in ([[1, 3]], [[1, 3], [0, 5], [-2, 6]], [[1, 3], [0, 5], [2, 6.5]], [1, 3], "all"):
        data["cases"][1]["crop"] = wrong
        assert "cases[1].crop" in refusal(tmp_path, data)


def test_every_field_of_the_design_is_read(tmp_path: Path) -> None:
    text = """
    version: 1
    name: hippocampus
    kind: logits                # or probabilities; never guessed
    axes: czyx
    classes: [background, anterior, posterior]
    ignore_label: null
    cases:
      - id: hippocampus_017
        members: [member_0/hippocampus_017.npz, ./member_1//hippocampus_017.npz]
        label: labels/hippocampus_017.nii.gz
        image: images/hippocampus_017_0000.nii.gz
        group: site_a
        subject: patient_12
        deployed: nnunet_out/hippocampus_017.nii.gz
      - id: hippocampus_018
        members: [member_0/hippocampus_018.npz, member_1/hippocampus_018.npz]
    prediction: {mirroring: false, step_size: 0.5, folds: [0, 1, 2, 3, 4]}
    splits:
      - {calibration: [hippocampus_017], validation: [], test: []}
    """
    manifest = load(tmp_path, text)

    assert (manifest.name, manifest.kind, manifest.axes, manifest.ignore_label) == (
        "hippocampus",
        "logits",
        "czyx",
        None,
    )
    assert manifest.class_names == ("background", "anterior", "posterior")
    assert (manifest.n_classes, manifest.n_members, manifest.has_regions) == (3, 2, False)
    first = manifest.case("hippocampus_017")
    assert first.members == ("member_0/hippocampus_017.npz", "member_1/hippocampus_017.npz")
    assert (first.group, first.subject, first.deployed) == ("site_a", "patient_12", "nnunet_out/hippocampus_017.nii.gz")
    assert [case.id for case in manifest.labelled_cases] == ["hippocampus_017"]
    assert manifest.prediction is not None
    assert manifest.prediction.folds == (0, 1, 2, 3, 4)
    assert manifest.split_ids(0).calibration == ("hippocampus_017",)
    assert manifest.root == tmp_path
    assert manifest.path == tmp_path / "manifest.yaml"
    assert manifest.resolve(first.members[0]) == tmp_path / "member_0" / "hippocampus_017.npz"


def test_region_channels_are_counted_and_named(tmp_path: Path) -> None:
    regions = [{"name": "whole", "labels": [1, 2]}, {"name": "core", "labels": [2]}]
    manifest = load(tmp_path, content(classes=None, regions=regions, regions_class_order=[1, 2], ignore_label=3))

    assert manifest.has_regions
    assert manifest.n_classes == 2
    assert manifest.class_names == ("whole", "core")


def test_the_real_manifest_loads(hippocampus: Path) -> None:
    manifest = Manifest.load(hippocampus / "manifest.yaml")

    assert (len(manifest.cases), manifest.n_members, len(manifest.splits)) == (60, 5, 3)
    assert [len(manifest.split_ids(0).subset(name)) for name in ("calibration", "validation", "test")] == [30, 10, 20]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_manifests_are_valid_and_commented(path: Path) -> None:
    manifest = Manifest.load(path)

    assert manifest.cases
    assert path.read_text(encoding="utf-8").count("#") >= 5


def test_there_are_four_examples() -> None:
    assert [path.stem for path in EXAMPLES] == ["demo", "nnunet_five_folds", "regions_brats", "rgb_2d"]


@pytest.mark.parametrize(
    ("change", "place", "hint"),
    [
        ({"clases": ["a"]}, "clases", "`classes`"),
        ({"cases": [{"id": "a", "members": ["a.npz"], "lable": "a.nii"}]}, "cases[0].lable", "`label`"),
        ({"prediction": {"miroring": True}}, "prediction.miroring", "`mirroring`"),
        ({"splits": [{"calibration": ["case_0"], "tests": []}]}, "splits[0].tests", "`test`"),
        ({"regions": [{"name": "a", "label": [1]}], "classes": None}, "regions[0].label", "`labels`"),
        ({"zzz": 1}, "zzz", "regions_class_order"),
    ],
)
def test_unknown_keys_are_named_with_the_nearest_known_one(
    tmp_path: Path, change: dict[str, Any], place: str, hint: str
) -> None:
    message = refusal(tmp_path, content(**change))

    assert f"{place}: unknown key" in message
    assert hint in message


def _with_case(index: int, **changes: Any) -> dict[str, Any]:
    data = content()
    data["cases"][index] |= changes
    return data


REGION = {"name": "whole", "labels": [1, 2]}
FAULTS: dict[str, tuple[object, str]] = {
    "duplicate id": (_with_case(2, id="case_0"), r"cases: 'case_0' stands at \[0\] and at \[2\]"),
    "unequal members": (_with_case(1, members=["a.npz"]), r"cases\[1\].members: case_1 has 1 member, 2 of 3 .* have 2"),
    "a member twice": (
        _with_case(1, members=["a.npz", "./a.npz"]),
        r"cases\[1\].members: 'a.npz' is listed twice; every member of every case is a file of its own",
    ),
    "a member of two cases": (
        _with_case(1, members=["member_0/case_0.npz", "member_1/case_1.npz"]),
        r"cases\[1\].members: 'member_0/case_0.npz' is also a member of case_0; every member",
    ),
    "no members": (_with_case(1, members=[]), r"cases\[1\].members: the list is empty"),
    "unknown id in split": (content(splits=[{"test": ["case_9"]}]), r"splits\[0\].test: there is no case 'case_9'"),
    "overlap": (
        content(splits=[{"calibration": ["case_0"], "test": ["case_0"]}]),
        r"splits\[0\]: case_0 is in calibration and again in test",
    ),
    "id twice in a subset": (content(splits=[{"test": ["case_0", "case_0"]}]), "case_0 is in test and again in test"),
    "empty split": (content(splits=[{}]), r"splits\[0\]: no case at all"),
    "classes and regions": (content(regions=[REGION]), "both `classes` and `regions`"),
    "neither": (content(classes=None), "neither `classes` nor `regions`"),
    "one class": (content(classes=["organ"]), "fewer than two"),
    "class twice": (content(classes=["a", "b", "a"]), r"classes: 'a' stands at \[0\] and at \[2\]"),
    "class is a yes/no word": (content() | {"classes": ["background", False]}, r"classes\[1\].*yes/no.*quotes"),
    "order length": (
        content(classes=None, regions=[REGION], regions_class_order=[1, 2]),
        "regions_class_order has 2 entries but there are 1 regions",
    ),
    "order missing": (content(classes=None, regions=[REGION]), "regions_class_order is missing"),
    "order without regions": (content(regions_class_order=[1, 2]), "regions_class_order belongs to `regions`"),
    "no region": (content(classes=None, regions=[], regions_class_order=[]), "regions: the list is empty"),
    "background region": (
        content(classes=None, regions=[{"name": "bg", "labels": [0]}], regions_class_order=[0]),
        "background alone",
    ),
    "ignored label in region": (
        content(classes=None, regions=[REGION], regions_class_order=[1], ignore_label=2),
        r"ignore_label: 2 .*regions\[0\]",
    ),
    "ignore label is a class": (content(ignore_label=1), "ignore_label: 1 is the class 'organ'"),
    "version": (content(version=2), "version: 2 is not a version .* write `version: 1`"),
    "version is true": (content(version=True), "version: True"),
    "kind": (content(kind="logit"), "kind: 'logit': should be 'logits' or 'probabilities'"),
    "kind missing": (content(kind=None), "kind: missing"),
    "axes": (content(axes="czy"), "axes: 'czy' is none of czyx, cxyz, cyx"),
    "absolute path": (_with_case(0, label="/data/a.nii.gz"), r"cases\[0\].label: '/data/a.nii.gz' is an absolute path"),
    "windows path": (_with_case(0, image="C:\\data\\a.nii"), r"cases\[0\].image: .* is an absolute path"),
    "home path": (_with_case(0, label="~/a.nii.gz"), "absolute path"),
    "empty path": (_with_case(0, label=" "), r"cases\[0\].label: an empty path"),
    "no cases": (content(cases=[]), "cases: the list is empty"),
    "cases missing": (content(cases=None), "cases: missing"),
    "id is a number": (_with_case(1, id=17), r"cases\[1\].id: 17 was read as a number.*quotes"),
    "id with a slash": (_with_case(1, id="../x"), r"cases\[1\].id: '../x' cannot be a case id"),
    "id with blanks": (_with_case(1, id="x "), "blanks"),
    "id with a line break": (_with_case(1, id="a\nb"), "control characters"),
    "step size": (content(prediction={"step_size": 2.0}), "prediction.step_size: 2.0"),
    "fold": (content(prediction={"folds": [0, 1.5]}), r"prediction.folds\[1\]: 1.5: expected a whole number"),
    "not a mapping": ("- a\n- b\n", "the file is a list, expected a mapping"),
    "text": ("hello\n", "the file is a text"),
    "empty file": ("", "the file is empty"),
    "syntax": ("version: [1\nname: x\n", "not valid YAML: line 2"),
    "bad date": ("version: 2001-99-99\n", "not valid YAML: month must be"),
    "object tag": ("!!python/object/apply:os.getcwd []\n", "not valid YAML"),
    "key twice": ("version: 1\nname: a\nname: b\n", "line 3: the key `name` is written twice"),
    "alias": ("a: &x [1]\nb: *x\n", r"line 2: the alias `\*x` is not allowed"),
    "deep": ("[" * (LIMIT_DEPTH + 1) + "]" * (LIMIT_DEPTH + 1), "nested deeper"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_own_message(tmp_path: Path, fault: str) -> None:
    data, pattern = FAULTS[fault]

    assert re.search(pattern, refusal(tmp_path, data))


def test_a_case_without_label_cannot_be_in_a_split(tmp_path: Path) -> None:
    data = content(splits=[{"calibration": ["case_1"]}])
    del data["cases"][1]["label"]

    assert "case_1 has no label" in refusal(tmp_path, data)


def test_a_split_may_not_tear_a_subject_apart(tmp_path: Path) -> None:
    data = content(splits=[{"calibration": ["case_0"], "test": ["case_1", "case_2"]}])
    data["cases"][0]["subject"] = data["cases"][2]["subject"] = "patient_1"

    message = refusal(tmp_path, data)

    assert "subject 'patient_1' is torn apart: case_0 is in calibration, case_2 in test" in message


def test_all_faults_are_told_at_once_but_not_hundreds(tmp_path: Path) -> None:
    data = content(n_cases=30)
    for case in data["cases"]:
        case["lable"] = "x"

    message = refusal(tmp_path, data)

    assert "30 faults" in message
    assert message.count("unknown key") == 5
    assert "and 25 more" in message


def test_an_alias_bomb_is_refused_before_it_is_built(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]

    assert "alias" in refusal(tmp_path, "\n".join(lines))


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "manifest.yaml"
    path.write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(ManifestError, match="not UTF-8"):
        Manifest.load(path)
    with path.open("wb") as stream:
        stream.truncate(LIMIT_BYTES + 1)
    with pytest.raises(ManifestError, match="larger than 64 MB"):
        Manifest.load(path)
    with pytest.raises(ManifestError, match="cannot be read"):
        Manifest.load(tmp_path)
    with pytest.raises(MissingFileError, match=r"gone\.yaml"):
        Manifest.load(tmp_path / "gone.yaml")


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "ignore")))
def test_no_bytes_give_anything_but_a_manifest_error(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(raw)
    with pytest.raises(ManifestError):
        Manifest.load(path)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(key=st.sampled_from(list(Manifest.model_fields)), value=_JSON)
def test_any_value_in_any_field_is_accepted_or_refused_cleanly(key: str, value: object) -> None:
    try:
        manifest = Manifest.from_content(content() | {key: value}, "somewhere/m.yaml")
    except ManifestError as error:
        assert "m.yaml" in str(error)  # noqa: PT017 - both outcomes are allowed
    else:
        assert manifest.model_dump(mode="json", exclude_none=True)


def test_the_hash_depends_on_content_alone(tmp_path: Path) -> None:
    block = load(tmp_path, content())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    flow = load(elsewhere, "# another form\n" + yaml.safe_dump(content(), default_flow_style=True, sort_keys=True))
    written_default = load(elsewhere, content(axes="czyx", splits=[]) | {"ignore_label": None})

    assert block.sha256 == flow.sha256 == written_default.sha256
    assert re.fullmatch("[0-9a-f]{64}", block.sha256)
    assert load(tmp_path, content(name="other")).sha256 != block.sha256
    assert load(tmp_path, content(kind="probabilities")).sha256 != block.sha256
    assert load(tmp_path, _with_case(2, group="a")).sha256 != block.sha256


def test_the_hash_of_a_known_manifest_never_changes(tmp_path: Path) -> None:
    """Calibrators carry this hash; a segcal that computed another one would call every old calibrator foreign."""
    canonical = (
        '{"axes":"czyx","cases":[{"id":"case_0","label":"labels/case_0.nii.gz",'
        '"members":["member_0/case_0.npz","member_1/case_0.npz"]}],'
        '"classes":["background","organ"],"kind":"logits","name":"small","splits":[],"version":1}'
    )

    assert load(tmp_path, content(n_cases=1)).sha256 == hashlib.sha256(canonical.encode()).hexdigest()


def test_save_and_load_give_the_same_content(tmp_path: Path) -> None:
    data = content(splits=[{"calibration": ["case_0"], "validation": ["case_1"], "test": ["case_2"]}])
    data["cases"][0] |= {"subject": "001", "group": "null", "image": "bilder/größe.nii.gz"}
    manifest = load(tmp_path, data)

    saved = manifest.save(tmp_path / "copy.yaml")

    assert Manifest.load(tmp_path / "copy.yaml").sha256 == saved.sha256 == manifest.sha256
    assert "größe" in (tmp_path / "copy.yaml").read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.yaml", "manifest.yaml"]


def test_saving_in_another_folder_keeps_pointing_at_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = content()
    data["cases"][0]["deployed"] = "out/case_0.nii.gz"
    manifest = load(tmp_path / "data", data)

    saved = manifest.save(tmp_path / "elsewhere" / "deep" / "m.yaml")

    first = saved.cases[0]
    assert first.members[0] == "../../data/member_0/case_0.npz"
    for path, original in [(first.label, "labels/case_0.nii.gz"), (first.deployed, "out/case_0.nii.gz")]:
        assert path is not None
        assert Path(os.path.normpath(saved.resolve(path))) == tmp_path / "data" / original


def test_saving_through_a_linked_folder_keeps_the_paths_true(tmp_path: Path) -> None:
    (tmp_path / "data" / "labels").mkdir(parents=True)
    (tmp_path / "data" / "labels" / "case_0.nii.gz").touch()
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away", target_is_directory=True)

    saved = load(tmp_path / "data", content()).save(tmp_path / "link" / "m.yaml")

    assert saved.resolve(saved.cases[0].label or "").exists()


def test_a_manifest_moves_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    before = load(tmp_path / "old", content())
    shutil.move(tmp_path / "old", tmp_path / "new")

    after = Manifest.load(tmp_path / "new" / "manifest.yaml")

    assert after.sha256 == before.sha256
    assert after.root == tmp_path / "new"


def test_a_manifest_is_frozen(tmp_path: Path) -> None:
    manifest = load(tmp_path, content())
    with pytest.raises(ValidationError, match="frozen"):
        manifest.name = "other"
    with pytest.raises(ValidationError, match="frozen"):
        manifest.cases[0].id = "other"


def test_wrong_questions_get_an_answer_that_helps(tmp_path: Path) -> None:
    plain = load(tmp_path, content())
    with pytest.raises(UsageError, match="did you mean 'case_1'"):
        plain.case("cas_1")
    with pytest.raises(UsageError, match=r"gives no splits.*`evaluate` measures all labelled cases"):
        plain.split_ids(0)
    split = load(tmp_path, content(splits=[{"test": ["case_0"]}]))
    for k in (1, -1):
        with pytest.raises(UsageError, match=rf"splits 0\.\.0, not {k}"):
            split.split_ids(k)
    with pytest.raises(ManifestError, match="made in memory"):
        _ = Manifest.model_validate(content()).root


def test_key_paths_read_like_the_file() -> None:
    assert key_path(("cases", 3, "lable")) == "cases[3].lable"
    assert key_path(("prediction", "folds", 1, "int")) == "prediction.folds[1]"
