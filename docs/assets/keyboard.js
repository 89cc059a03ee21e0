// Lets the keyboard scroll wide tables and blocks of code. The theme wraps them when they come into sight.
const reachable = () => {
  for (const block of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code"))
    if (block.scrollWidth > block.clientWidth) block.tabIndex = 0;
};
new MutationObserver(reachable).observe(document.body, { childList: true, subtree: true });
addEventListener("resize", reachable);
reachable();
