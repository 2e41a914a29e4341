"""The peer's example scripts, with arguments for a short run on tiny models and its samples."""

from __future__ import annotations

from typing import NamedTuple

from .facts import FACTS


class Script(NamedTuple):
    """An example script and its arguments.

    In arguments, `{data}` is the folder of the peer's samples, `{out}` one to write to, and
    `{adapter}` the folder of an adapter that an earlier run has written.
    """

    path: str
    model: str
    arguments: str
    first: str = ""  # the script that trains the adapter
    again: bool = True  # a second run loads the adapter of the first, and only evaluates
    facts: tuple[str, ...] = FACTS

    @property
    def arguments_again(self) -> str:
        """Those of the second run."""
        return self.arguments.replace("--do_train ", "--load_adapter {adapter} ")


_TRAIN = (
    "--do_train --do_eval --train_adapter --per_device_train_batch_size 2 --max_steps 2 "
    "--learning_rate 5e-4 --seed 42 --use_cpu --report_to none --output_dir {out} "
)
_BN = "--adapter_config double_seq_bn[reduction_factor=8] "
_FILES = "--train_file {data}/%s --validation_file {data}/%s "


def _files(name: str) -> str:
    return _FILES % (name, name)


SCRIPTS = {
    "glue": Script("text-classification/run_glue.py", "bert", _TRAIN + _BN + "--max_seq_length 64 "
                   "--train_file {data}/MRPC/train.csv --validation_file {data}/MRPC/dev.csv"),
    "fusion": Script("adapterfusion/run_fusion_glue.py", "bert", _TRAIN + "--max_seq_length 64 "
                     "--task_name mrpc --data_dir {data}/MRPC", again=False),
    "qa": Script("question-answering/run_qa.py", "bert", _TRAIN + _BN + _files("SQUAD/sample.json")
                 + "--version_2_with_negative"),
    "seq2seq_qa": Script("question-answering/run_seq2seq_qa.py", "t5", _TRAIN + _BN +
                         _files("SQUAD/sample.json") + "--predict_with_generate "
                         "--context_column context --question_column question "
                         "--answer_column answers"),
    "summarization": Script("summarization/run_summarization.py", "bart", _TRAIN + _BN +
                            _files("xsum/sample.json") + "--predict_with_generate "
                            "--max_target_length 16"),
    "translation": Script("translation/run_translation.py", "bart", _TRAIN + _BN +
                          _files("wmt16/sample.json") + "--predict_with_generate "
                          "--max_target_length 16 --source_lang en --target_lang ro"),
    "clm": Script("language-modeling/run_clm.py", "gpt2", _TRAIN + _BN + "--block_size 64 "
                  "--train_file {data}/../sample_text.txt "
                  "--validation_file {data}/../sample_text.txt"),
    "mlm": Script("language-modeling/run_mlm.py", "roberta", _TRAIN + _BN + "--max_seq_length 64 "
                  "--train_file {data}/../sample_text.txt "
                  "--validation_file {data}/../sample_text.txt"),
    "ner": Script("token-classification/run_ner.py", "bert", _TRAIN + _BN +
                  _files("conll/sample.json")),
    "swag": Script("multiple-choice/run_swag.py", "bert", _TRAIN + _BN +
                   _files("swag/sample.json")),
    "udp": Script("dependency-parsing/run_udp.py", "bert", _TRAIN + "--task_name en_ewt "
                  "--evaluate_on train"),
    "adapterdrop": Script("adapterdrop/drop_at_inference.py", "", "", again=False,
                          facts=("loaded",)),
    "generation": Script("text-generation/run_generation.py", "gpt2", "--model_type gpt2 "
                         "--prompt Hello --length 4 --seed 42 --load_adapter {adapter}",
                         first="clm", again=False, facts=("loaded",)),
}  # fmt: skip
