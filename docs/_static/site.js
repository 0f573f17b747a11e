// The sidebar shows the present page, and a tap on a picture opens it alone, in its full size.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const box = document.querySelector(".sidebar-scroll");
  const here = document.querySelector(".sidebar-tree .current-page");
  if (box && here) box.scrollTop += here.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 3;
  for (const picture of document.querySelectorAll("article img:not(a img)")) {
    const link = document.createElement("a");
    link.href = picture.src;
    link.className = "picture";
    picture.replaceWith(link);
    link.append(picture);
  }
});
