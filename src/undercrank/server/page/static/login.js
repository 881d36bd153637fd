import { post } from "./api.js";

const form = document.getElementById("login");
const problem = document.getElementById("problem");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    await post("/login", { key: form.key.value.trim() });
    location.reload();
  } catch (error) {
    problem.textContent = error.message;
    problem.hidden = false;
    form.key.select();
  }
});
