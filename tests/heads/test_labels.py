"""Names of labels when the config of a head is changed or read."""

import pytest

from adapterzoo.errors import ConfigError
from adapterzoo.heads import (
    ClassificationConfig,
    DependencyParsingConfig,
    HeadConfig,
    TaggingConfig,
)


@pytest.mark.parametrize("kind", [ClassificationConfig, TaggingConfig, DependencyParsingConfig])
def test_names_stay_if_the_count_changes(kind):
    named = kind(num_labels=2, label2id={"no": 0, "yes": 1})
    for count in (2, 3):
        assert named.replace(num_labels=count).label2id == {"no": 0, "yes": 1}
    with pytest.raises(ConfigError, match="with 1 labels"):
        named.replace(num_labels=1)
    assert named.replace(num_labels=1, label2id={"a": 0}).label2id == {"a": 0}
    assert named.replace(num_labels=1, label2id=None) == kind(num_labels=1)


@pytest.mark.parametrize("values", [5, None, "classification", ["head_type"]])
def test_a_config_is_made_of_a_dict(values):
    for kind in (HeadConfig, TaggingConfig):
        with pytest.raises(ConfigError) as caught:
            kind.from_dict(values)
        assert repr(values) in str(caught.value)
        assert "Write {'head_type': '" in str(caught.value)
