"""Generation configs on the Hub: read at a revision, and pushed beside a folder's."""

import pytest

from descant.config.generation_config import GenerationConfig
from descant.errors import ConfigError, HubError, InputError

NAME = "generation_config.json"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_config_is_read_from_a_repository_at_a_revision(hub):
    repo = hub.repo("ann/model", {NAME: '{"num_beams": 2}', "model.safetensors": b"0" * 100})
    old = repo.head
    repo.tag("v1")
    repo.commit({NAME: '{"num_beams": 4}', "sampling.json": '{"do_sample": true, "top_p": 0.5}'})
    assert GenerationConfig.from_pretrained("ann/model") == GenerationConfig(num_beams=4)
    for revision in ("v1", old):
        config = GenerationConfig.from_pretrained("ann/model", revision=revision)
        assert config == GenerationConfig(num_beams=2)
    sampling = GenerationConfig.from_pretrained("ann/model", "sampling.json", top_p=0.9)
    assert sampling == GenerationConfig(do_sample=True, top_p=0.9)
    assert not [asked for asked in hub.since() if "safetensors" in asked]
    with pytest.raises(InputError, match=r"must name a file in 'ann/model', got 'sampling\.json'"):
        GenerationConfig.from_pretrained("ann/model", "sampling.json", revision="v1")
    with pytest.raises(HubError, match="no such revision"):
        GenerationConfig.from_pretrained("ann/model", revision="v2")
    with pytest.raises(ConfigError, match="`tempurature`"):
        GenerationConfig.from_pretrained("ann/model", tempurature=1)


def test_an_older_models_config_stands_in(hub):
    repo = hub.repo("ann/old", {"config.json": '{"vocab_size": 9, "num_beams": 4, "top_p": 1.0}'})
    assert GenerationConfig.from_pretrained("ann/old", top_k=3) == GenerationConfig(num_beams=4, top_k=3)
    assert GenerationConfig.from_pretrained("ann/old", "config.json").extra == {"vocab_size": 9}
    with pytest.raises(InputError, match=r"got 'other\.json'"):
        GenerationConfig.from_pretrained("ann/old", "other.json")
    repo.commit({NAME: "{}"})
    assert GenerationConfig.from_pretrained("ann/old") == GenerationConfig()


def test_tokens_and_renamed_repositories(hub):
    hub.user("ann", "hf_anns")
    hub.repo("ann/secret", {NAME: '{"num_beams": 2}'}, private=True)
    with pytest.raises(HubError, match="private"):
        GenerationConfig.from_pretrained("ann/secret")
    assert GenerationConfig.from_pretrained("ann/secret", token="hf_anns").num_beams == 2
    hub.rename("ann/secret", "ann/known")
    with pytest.raises(HubError, match="renamed"):
        GenerationConfig.from_pretrained("ann/secret", token="hf_anns")


def test_a_folder_comes_first_and_has_no_revision(hub, tmp_path):
    hub.repo("ann/model", {NAME: '{"num_beams": 2}'})
    GenerationConfig(num_beams=3).save_pretrained("ann/model")
    assert GenerationConfig.from_pretrained("ann/model").num_beams == 3
    assert GenerationConfig.from_pretrained(tmp_path / "ann" / "model").num_beams == 3
    with pytest.raises(InputError, match="`revision` must be None for a local folder"):
        GenerationConfig.from_pretrained("ann/model", revision="v2")
    assert GenerationConfig.from_pretrained("ann/model", revision="main").num_beams == 3, (
        "the documented default"
    )
    hub.repo("eve/model", {NAME: "{}"})
    for given in (tmp_path / "eve" / "model", "./eve/model", "eve", "eve/model/x", "eve\\model"):
        with pytest.raises(InputError, match="must be a local folder, or owner/name"):
            GenerationConfig.from_pretrained(given)
    assert hub.asked == []


# -- pushing


def test_the_documented_push(hub, tmp_path):
    hub.user("my_account", "hf_mine")
    hub.login("hf_mine")
    config = GenerationConfig(max_new_tokens=50, do_sample=True, top_k=50)
    config.save_pretrained("my_account/my_model", push_to_hub=True)
    repo = hub.repos["my_account/my_model"]
    written = (tmp_path / "my_account" / "my_model" / NAME).read_bytes()
    assert (repo.files, repo.commits[repo.head].message, repo.private) == (
        {NAME: written},
        f"Upload {NAME}",
        False,
    )
    config.replace(top_k=3).save_pretrained("my_account/my_model", "other.json", push_to_hub=True)
    assert set(repo.files) == {NAME, "other.json"}
    (tmp_path / "my_account").rename(tmp_path / "moved")
    assert GenerationConfig.from_pretrained("my_account/my_model") == config
    assert GenerationConfig.from_pretrained("my_account/my_model", "other.json").top_k == 3


def test_a_push_uses_its_options(hub, tmp_path):
    hub.user("ann", "hf_anns")
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "private-notes.txt").write_text("not to be pushed")
    GenerationConfig(num_beams=2).save_pretrained(
        tmp_path / "f",
        push_to_hub=True,
        repo_id="ann/configs",
        token="hf_anns",
        private=True,
        commit_message="2",
    )
    repo = hub.repos["ann/configs"]
    assert (set(repo.files), repo.private, repo.commits[repo.head].message) == ({NAME}, True, "2")
    assert "GET /api/whoami-v2" not in hub.since()
    GenerationConfig().save_pretrained(tmp_path / "f", push_to_hub=True, repo_id="plain", token="hf_anns")
    assert set(hub.repos) == {"ann/configs", "ann/plain"}


def test_a_push_without_a_token_is_an_error_and_the_file_is_there(hub, tmp_path):
    with pytest.raises(
        HubError, match="`folder` on the Hub: to push takes a token, and there is none"
    ) as error:
        GenerationConfig(num_beams=2).save_pretrained(tmp_path / "folder", push_to_hub=True)
    assert "\n" not in str(error.value)
    assert hub.asked == []
    assert GenerationConfig.from_pretrained(tmp_path / "folder").num_beams == 2
    with pytest.raises(HubError, match="there is none"):
        GenerationConfig().save_pretrained(tmp_path / "f", push_to_hub=True, repo_id="ann/c", token=False)


@pytest.mark.parametrize(
    "given", [{"repo_id": "ann/x"}, {"private": False}, {"commit_message": "x"}, {"repo_id": ""}]
)
def test_what_only_a_push_needs_is_refused_without_one(tmp_path, given):
    with pytest.raises(InputError, match="must be None without `push_to_hub`"):
        GenerationConfig().save_pretrained(tmp_path / "f", **given)
    assert not (tmp_path / "f").exists()


def test_a_folder_whose_name_is_no_repositorys_is_named(hub, tmp_path):
    hub.user("ann", "hf_anns")
    with pytest.raises(HubError, match="write owner/name"):
        GenerationConfig().save_pretrained(tmp_path / "my model", push_to_hub=True, token="hf_anns")
    assert hub.repos == {}
