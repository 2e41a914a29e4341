// A field that keeps the rows of the table of "Find your model" in which all of its words stand.
document.addEventListener("DOMContentLoaded", () => {
  const table = document.querySelector("#find-your-model table");
  if (!table) return;
  const rows = [...table.tBodies[0].rows];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const field = document.createElement("input");
  const count = document.createElement("output");
  field.type = "search";
  field.id = "model-search";
  field.placeholder = "Llama, qwen3, bert, mamba …";
  field.setAttribute("aria-label", "Find your model");
  count.htmlFor = field.id;

  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    rows.forEach((row, i) => {
      row.hidden = !words.every((word) => texts[i].includes(word));
      found += row.hidden ? 0 : 1;
    });
    count.textContent = words.length ? `${found} of ${rows.length}` : "";
  };

  field.addEventListener("input", show);
  const line = document.createElement("p");
  line.append(field, " ", count);
  document.querySelector("#find-your-model p").after(line);
  // a link may carry the name: architectures.html#find=mamba
  const asked = /^#find=(.+)$/.exec(window.location.hash);
  if (asked) field.value = decodeURIComponent(asked[1]);
  show();
});
