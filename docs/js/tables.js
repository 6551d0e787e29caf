// A table that fits needs no box of its own to scroll in: its header then stays below the page's.
const fit = () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) {
    box.classList.toggle("fits", box.scrollWidth <= box.clientWidth);
  }
};
window.addEventListener("load", fit);
window.addEventListener("resize", fit);
