// a click on a picture shows it alone, as large as it is
document.addEventListener("click", (event) => {
  if (event.target.matches(".md-typeset img")) window.open(event.target.src);
});
