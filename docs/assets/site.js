// Long names in code, such as pipe=2,fsdp=4,zero=1,microbatches=8, may break after a comma, a space, a slash, a bracket,
// and before the value of a flag that begins with a minus.
for (const code of document.querySelectorAll(".md-content :not(pre) > code")) {
  if (code.textContent.length <= 24 || code.childElementCount) continue
  code.replaceChildren(...code.textContent.split(/(?<=[,\s/(])|(?=\.[a-z])|(?<==)(?=-)/).flatMap((part, i) => i ? [document.createElement("wbr"), part] : [part]))
}

// On a phone the text of a wide picture is small: it opens alone when it is touched.
for (const image of document.querySelectorAll(".md-content img")) {
  if (image.closest("a")) continue
  const link = document.createElement("a")
  link.href = image.src
  image.replaceWith(link)
  link.append(image)
}
