"""One mistake a line; the comment is a part of what mypy says of it."""

from pathlib import Path

from transformers import AutoModelForCausalLM, BertForSequenceClassification, TrainingArguments

import adapterzoo
from adapterzoo import AdapterPol  # E: has no attribute "AdapterPol"
from adapterzoo import LoraConfig  # E: has no attribute "LoraConfig"; maybe
from adapterzoo import get_peft_model  # E: has no attribute "get_peft_model"
from adapterzoo import (
    AdapterSetup,
    AdapterTrainer,
    AutoAdapterModel,
    BatchSplit,
    LoRAConfig,
    MultiAdapterTrainer,
    SeqBnConfig,
    Split,
    Stack,
    init,
    load_model,
)
from adapterzoo.peft import LoRAConfig as P  # E: has no attribute "LoRAConfig"; maybe
from adapterzoo.peft import PeftModel, TaskType
from adapterzoo.serving import AdapterPool, AdapterPol as Q  # E: has no attribute "AdapterPol"

# --- models ---

model = AutoAdapterModel.from_pretrained("bert-base-uncased")
model.add_adaptr("a")  # E: has no attribute "add_adaptr"
model.add_adapter("a", confg="lora")  # E: did you mean "config"?
model.add_adapter("a", config=8)  # E: No overload variant of "add_adapter"
model.active_adapter = "a"  # E: Property "active_adapter"
model.activ_adapters = "a"  # E: Incompatible types in assignment
model.set_active_adapters(5)  # E: has incompatible type "int"
model.active_adapters = 5  # E: Incompatible types in assignment
model.train_adapter(5)  # E: has incompatible type "int"
model.train_adapter("a", train_embedings=True)  # E: Unexpected keyword argument "train_embedings"
model.add_classification_head("a", num_label=2)  # E: Unexpected keyword argument "num_label"
model.add_classification_head("a", num_labels="2")  # E: has incompatible type "str"
model.add_classification_head("a", pooling="men")  # E: has incompatible type "Literal['men']"
model.add_clasification_head("a")  # E: has no attribute "add_clasification_head"
model.save_adapter(Path("a"))  # E: Missing positional argument "adapter_name"
model.average_adapter("c", "a", weights=2)  # E: has incompatible type "int"
model.generat(max_new_tokens=3)  # E: has no attribute "generat"
model.save_pretraind("a")  # E: has no attribute "save_pretraind"
rows: int = model.adapter_summary()  # E: expression has type "str", variable has type "int"
name: int = model.load_adapter("a")  # E: expression has type "str", variable has type "int"
model.delete_adapter("a").x  # E: "delete_adapter"
model.convert_adapter("a").eror  # E: "Certificate" has no attribute "eror"
AutoAdapterModel.from_pretraind("a")  # E: has no attribute "from_pretraind"
AutoAdapterModel.from_pretrained(3)  # E: No overload variant of "from_pretrained"

adapted = init(AutoModelForCausalLM.from_pretrained("gpt2"))
adapted.add_adaptr("a")  # E: has no attribute "add_adaptr"
adapted.add_causal_lm_head("a")  # E: has no attribute "add_causal_lm_head"
adapted.merge_adaptr("a")  # E: has no attribute "merge_adaptr"
adapted.set_adapter(3)  # E: has incompatible type "int"
bert = init(BertForSequenceClassification.from_pretrained("a"), interfce=None)  # E: "interfce"
init("bert")  # E: has incompatible type "str"; expected Module
load_model("a", BertForSequenceClassification).merge()  # E: has no attribute "merge"

# --- configs ---

LoRAConfig(rank=8)  # E: Unexpected keyword argument "rank" for "LoRAConfig"
LoRAConfig(8)  # E: Too many positional arguments for "LoRAConfig"
LoRAConfig(r="8")  # E: has incompatible type "str"; expected "int"
LoRAConfig(lora_alpha="16")  # E: has incompatible type "str"; expected "float"
LoRAConfig(target_modules=5)  # E: has incompatible type "int"
LoRAConfig(boft_block_size=8)  # E: Unexpected keyword argument "boft_block_size"
LoRAConfig().rank  # E: "LoRAConfig" has no attribute "rank"
LoRAConfig().r = 4  # E: Property "r" defined in
SeqBnConfig(reduction_factor="16")  # E: has incompatible type "str"
adapterzoo.BOFTConfig(lora_alpha=8)  # E: Unexpected keyword argument "lora_alpha"
adapterzoo.LoraConfig(r=8)  # E: Module has no attribute "LoraConfig"; maybe

# --- compositions ---

Stack("a", 5)  # E: has incompatible type "int"
Stak("a")  # E: Name "Stak" is not defined
Split("a", "b")  # E: Missing named argument "splits"
BatchSplit("a", "b", batch_size=[1, 2])  # E: Unexpected keyword argument "batch_size"
AdapterSetup(5)  # E: has incompatible type "int"

# --- trainers ---

arguments = TrainingArguments("runs")
AdapterTrainer("model", arguments)  # E: has incompatible type "str"
MultiAdapterTrainer(model).ad("a")  # E: has no attribute "ad"
MultiAdapterTrainer(model, at_once="8")  # E: has incompatible type "str"
adapterzoo.sweep(model, arguments, [])  # E: Missing named argument "grid"

# --- PEFT's names ---

adapterzoo.peft.LoraConfig(rr=8)  # E: Unexpected keyword argument "rr" for "LoraConfig"
adapterzoo.peft.LoraConfig(r="8")  # E: has incompatible type "str"; expected "int"
adapterzoo.peft.LoraConfig(task_type="CAUSAL")  # E: has incompatible type "Literal['CAUSAL']"
TaskType.CAUSAL  # E: "type[TaskType]" has no attribute "CAUSAL"
wrapped = adapterzoo.peft.get_peft_model(adapted, "lora")  # E: has incompatible type "str"
wrapped.print_trainable_parameter()  # E: has no attribute "print_trainable_parameter"
PeftModel.from_pretrained(adapted, "a").merge_and_unlod()  # E: has no attribute "merge_and_unlod"
