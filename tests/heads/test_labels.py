"""Names of labels when the config of a head is changed or read."""

import pytest

from adapterzoo.errors import ConfigError
from adapterzoo.heads import (
    ClassificationConfig,
    DependencyParsingConfig,
    HeadConfig,
    MultipleChoiceConfig,
    TaggingConfig,
)


@pytest.mark.parametrize("kind", [ClassificationConfig, TaggingConfig, DependencyParsingConfig])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_numbered_labels_follow_their_count(kind, count):
    assert kind(num_labels=2).replace(num_labels=count) == kind(num_labels=count)


def test_choices_are_counted_under_their_own_name():
    changed = MultipleChoiceConfig(num_choices=2).replace(num_choices=4)
    assert changed == MultipleChoiceConfig(num_choices=4)


@pytest.mark.parametrize("kind", [ClassificationConfig, TaggingConfig, DependencyParsingConfig])
@pytest.mark.parametrize("count", [1, 3])
def test_names_do_not_get_another_count_by_themselves(kind, count):
    named = kind(num_labels=2, label2id={"no": 0, "yes": 1})
    with pytest.raises(ConfigError) as caught:
        named.replace(num_labels=count)
    text = str(caught.value)
    assert f"{kind.__name__}.replace(num_labels={count})" in text
    assert "2 classes" in text
    assert "'no', 'yes'" in text
    assert f"Write replace(num_labels={count}, label2id=" in text
    names = {"a": 0}
    assert named.replace(num_labels=count, label2id=names).label2id == names
    assert named.replace(num_labels=count, label2id=None) == kind(num_labels=count)
    # what does not change the count keeps the names
    assert named.replace(num_labels=2).label2id == {"no": 0, "yes": 1}


@pytest.mark.parametrize("values", [5, None, "classification", ["head_type"]])
def test_a_config_is_made_of_a_dict(values):
    for kind in (HeadConfig, TaggingConfig):
        with pytest.raises(ConfigError) as caught:
            kind.from_dict(values)
        assert repr(values) in str(caught.value)
        assert "Write {'head_type': '" in str(caught.value)
